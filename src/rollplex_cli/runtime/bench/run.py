"""Benchmark of schedules: the same prompts and response lengths under each, in alternation, in one process.

Alternating ABBA inside one run cancels what drifts (clock, caches, neighbours on the host); two separate runs
would compare those instead of the schedules. `disagg`, with half of the ranks in each role, and `matched-tp` need
engines built differently: each takes the same pairs in processes of its own, right after the others (`join.py`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rollplex_cli.core.errors import InterruptedRunError, UsageError
from rollplex_cli.core.files import read_json, write_atomic
from rollplex_cli.core.names import TaskKind
from rollplex_cli.core.seeds import derive_seed
from rollplex_cli.engines.inputs import build_prompt_input
from rollplex_cli.plan.memory import RELEASES
from rollplex_cli.plan.memory.ablations import ALL_STEP
from rollplex_cli.plan.workloads import WORKLOADS
from rollplex_cli.profile.sections.reuse import ReuseProfile
from rollplex_cli.profile.sharing import parse_policy
from rollplex_cli.runtime.bench.join import join, merge, of_workload
from rollplex_cli.runtime.bench.prompts import CoinFlips, draw_inputs
from rollplex_cli.runtime.bench.result import PEAKS, build_result
from rollplex_cli.runtime.executor.schedules import schedule_of
from rollplex_cli.runtime.sharing.calibrate import calibrate
from rollplex_cli.runtime.step import run_step

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.plan.workloads import Workload
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.runtime.assembly.rank import Rank
    from rollplex_cli.runtime.executor.schedules import Schedule
    from rollplex_cli.runtime.sharing.calibrate import Measurement

NUM_WARM_UP_PAIRS = 1
NOTHING_REUSED = ReuseProfile(rollout_prefix=False, vision=False, frozen_vision=False, skip_zero_advantage=False)
ABLATIONS: dict[str, frozenset[TaskKind]] = {
    "reference-overlap": frozenset({TaskKind.REF_PREFIX, TaskKind.REF_SUFFIX}),
    "actor-overlap": frozenset({TaskKind.ACTOR_PREFIX, TaskKind.ACTOR_SUFFIX, TaskKind.ACTOR_PREFIX_BACKWARD}),
    "early-groups": frozenset(),
    "vision-reuse": frozenset(),
}
"""What each leaves out of the overlap; the last has every role run its own vision tower. Beside them what the memory
plan calls RELEASES can be left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run the step."""

    name: str
    schedule: str
    policy: str
    profile: Profile
    order: Schedule
    kept: frozenset[str] = frozenset()
    """Objects that this variant does not release within a step."""


def run_bench(rank: Rank) -> None:
    """Measure the profile's schedule against what the run folder's request names, and write the result: after every
    workload that of all so far.

    Raises:
        UsageError: an unknown baseline, workload or ablation.
        RunFailedError: a result to join whose work was another.
    """
    request = read_json(rank.run.bench) or {}
    workloads = [_workload(name) for name in request.get("workloads") or [None]]
    variants = _variants(rank.profile, request)
    beside = read_json(Path(request["beside"])) or {} if "beside" in request else None
    scorer, results, pairs = rank.engines.scorer, [], int(request.get("steps", 8))
    numbers = itertools.count(1)
    for index, workload in enumerate(workloads):
        rank.engines = dataclasses.replace(
            rank.engines, scorer=scorer if workload is None else CoinFlips(rank.profile.rollout.group_size)
        )
        # Engines that are warm only have to see the sizes of another workload once.
        warm_up = variants[:1] if index else variants
        rows, measured = _measure(rank, variants, warm_up, workload, pairs, numbers)
        if rank.peers.rank == 0:
            name = rank.profile.name if workload is None else workload.name
            result = build_result(rank, variants, rows, name, measured)
            results.append(result if beside is None else join(of_workload(beside, name), result))
            write_atomic(rank.run.bench_result, json.dumps(merge(results), indent=2) + "\n")


def _measure(
    rank: Rank,
    variants: list[Variant],
    warm_up: list[Variant],
    workload: Workload | None,
    pairs: int,
    numbers: Iterator[int],
) -> tuple[dict[str, list[dict[str, Any]]], list[Measurement]]:
    """Rows of each variant, and what `auto` decided by; the steps take their `numbers`."""
    rows: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in variants}
    measured = []
    if any(parse_policy(variant.policy).measured for variant in variants):
        measured = calibrate(rank, _inputs(rank, workload, 0))
    for pair in range(NUM_WARM_UP_PAIRS + pairs):
        inputs = _inputs(rank, workload, pair)
        lengths = {g: _lengths(rank, workload, pair, g) for g in range(len(inputs))}
        measures = pair >= NUM_WARM_UP_PAIRS
        taken = variants if measures else warm_up
        for variant in taken if pair % 2 == 0 else reversed(taken):
            row = _step(rank, next(numbers), variant, inputs, lengths, workload)
            if measures:
                rows[variant.name].append(row)
    rank.memory.residency.keep(())
    return rows, measured


def _step(
    rank: Rank,
    number: int,
    variant: Variant,
    inputs: list[PromptInput],
    lengths: dict[int, list[int]],
    workload: Workload | None,
) -> dict[str, Any]:
    rank.control.step = number
    rank.sharing.follow(parse_policy(variant.policy))
    rank.memory.residency.keep(variant.kept)
    allocations = _device_allocations()
    rank.memory.meter.take_peaks()
    result = run_step(rank, number, inputs, variant.order, lengths=lengths, profile=variant.profile)
    outcome = result.tasks.outcome  # of a rank that trains
    peaks = rank.memory.meter.take_peaks() if torch.cuda.is_available() else (0, 0)
    prompt_tokens = [i.num_tokens for i in inputs] if rank.team.leads else []
    own = {"prompt_tokens": prompt_tokens, "peaks": peaks, "stop": rank.control.stop_requested}
    every = rank.peers.meet(f"bench step {number}", own, rank.control.tick)
    prompt_tokens = [n for theirs in every for n in theirs["prompt_tokens"]]
    row = {
        **result.row,
        "optimizer": dataclasses.asdict(outcome.stats) if outcome is not None else None,
        **{name: max(theirs["peaks"][i] for theirs in every) or None for i, name in enumerate(PEAKS)},
        "device_allocations": _device_allocations() - allocations,
        "prompt_tokens": prompt_tokens,
        "num_responses": len(prompt_tokens) * rank.profile.rollout.group_size,
    }
    if rank.peers.rank == 0:
        with rank.run.metrics.open("a", encoding="utf-8") as stream:
            which = {"workload": workload and workload.name, "schedule": variant.schedule, "variant": variant.name}
            stream.write(json.dumps({**row, **which}) + "\n")
    if any(theirs["stop"] for theirs in every):
        raise InterruptedRunError(f"stopped by a signal after step {number} of a benchmark")
    return row


def _device_allocations() -> int:
    """How often PyTorch has asked the driver for memory; each time stalls the device."""
    return int(torch.cuda.memory_stats().get("num_device_alloc", 0)) if torch.cuda.is_available() else 0


def _variants(profile: Profile, request: dict[str, Any]) -> list[Variant]:
    own = profile.schedule.name
    if profile.disaggregated:
        profile = _as_published(profile)
    policies = request.get("policies") or [profile.schedule.policy]
    first = request.get("name", own)
    found = [_variant(profile, first if i == 0 else f"{own} {p}", own, p) for i, p in enumerate(policies)]
    for name in request.get("baselines", []):
        if name == "colocate":
            found.append(_variant(_as_published(profile), name, "colocate", "serial"))
        elif name == "colocate_same_work":
            found.append(_variant(profile, name, "colocate", "serial"))
        else:
            raise UsageError(f"no such baseline: `{name}`", hint="baselines are: colocate, colocate_same_work")
    for name in request.get("ablations", []):
        if name not in ABLATIONS and name not in RELEASES:
            raise UsageError(f"no such ablation: `{name}`", hint=f"ablations are: {', '.join((*ABLATIONS, *RELEASES))}")
        found.append(_variant(profile, f"without {name}", own, policies[0], ablation=name))
    return list({variant.name: variant for variant in found}.values())


def _as_published(profile: Profile) -> Profile:
    """A baseline's: every role computes every prefix once, and every group is trained."""
    algorithm = dataclasses.replace(profile.algorithm, skip_zero_variance=False)
    return dataclasses.replace(profile, reuse=NOTHING_REUSED, algorithm=algorithm)


def _variant(profile: Profile, name: str, schedule: str, policy: str, ablation: str = "") -> Variant:
    order = schedule_of(profile, schedule)
    if ablation == "vision-reuse":
        reuse = dataclasses.replace(profile.reuse, vision=False, frozen_vision=False)
        profile = dataclasses.replace(profile, reuse=reuse)
    if ablation == "early-groups":
        order = dataclasses.replace(order, early_groups=False)
    if ablation in ABLATIONS:
        order = dataclasses.replace(order, never_beside_decode=ABLATIONS[ablation])
    kept = frozenset(ALL_STEP[RELEASES[ablation]] if ablation in RELEASES else ())
    return Variant(name=name, schedule=schedule, policy=policy, profile=profile, order=order, kept=kept)


def _workload(name: str | None) -> Workload | None:
    if name is None:
        return None
    if name not in WORKLOADS:
        raise UsageError(f"no such workload: `{name}`", hint=f"workloads are: {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def _inputs(rank: Rank, workload: Workload | None, pair: int) -> list[PromptInput]:
    if workload is None:
        return [build_prompt_input(p, rank.media_tokens) for p in rank.loader.batch(pair)]
    count = rank.profile.algorithm.prompts_per_step // rank.profile.data_parallel
    return draw_inputs(rank, workload, pair, count)


def _lengths(rank: Rank, workload: Workload | None, pair: int, group: int) -> list[int]:
    """Response lengths, a function of seed, pair and global group only: a workload's own, else drawn evenly from 1 to
    the limit."""
    rollout = rank.profile.rollout
    draw = random.Random(derive_seed(rank.profile.runtime.seed, "lengths", pair, rank.first_group + group))
    if workload is None:
        return [draw.randint(1, rollout.max_new_tokens) for _ in range(rollout.group_size)]
    return [workload.draw_response_tokens(draw, rollout.max_new_tokens) for _ in range(rollout.group_size)]
