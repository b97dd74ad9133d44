"""Benchmark of schedules: the same prompts and response lengths under each, in alternation, in one process.

Alternating ABBA inside one run cancels what drifts (clock, caches, neighbours on the host); two separate runs
would compare those instead of the schedules.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.files import read_json, write_atomic
from rollplex_cli.core.seeds import derive_seed
from rollplex_cli.engines.inputs import build_prompt_input
from rollplex_cli.runtime.executor.schedules import schedule_from
from rollplex_cli.runtime.step import run_step

if TYPE_CHECKING:
    from rollplex_cli.runtime.assembly.rank import Rank
    from rollplex_cli.runtime.executor.schedules import Schedule

NUM_WARM_UP_PAIRS = 1


def run_bench(rank: Rank) -> None:
    """Measure the profile's schedule against the baselines that the run folder's request names, and write the result.

    Raises:
        UsageError: an unknown baseline, or one that needs other rank roles than this launch has.
    """
    request = read_json(rank.run.bench) or {}
    names = [rank.profile.schedule.name, *request.get("baselines", [])]
    schedules = {name: _schedule(rank, name) for name in dict.fromkeys(names)}
    num_pairs = int(request.get("steps", 8))
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in schedules}
    number = 0
    for pair in range(NUM_WARM_UP_PAIRS + num_pairs):
        prompts = rank.loader.batch(pair)
        inputs = [build_prompt_input(p, rank.media_tokens) for p in prompts]
        lengths = {g: _lengths(rank, pair, g) for g in range(len(inputs))}
        order = list(schedules) if pair % 2 == 0 else list(reversed(schedules))
        for name in order:
            number += 1
            rank.control.step = number
            row = run_step(rank, number, inputs, schedules[name], lengths=lengths).row
            if pair >= NUM_WARM_UP_PAIRS:
                rows[name].append(row)
            if rank.peers.rank == 0:
                with rank.run.metrics.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps({**row, "schedule": name}) + "\n")
    if rank.peers.rank == 0:
        result = _result(rank, rows, request)
        write_atomic(rank.run.bench_result, json.dumps(result, indent=2) + "\n")


def _schedule(rank: Rank, name: str) -> Schedule:
    if name not in ("rollplex", "colocate"):
        raise UsageError(f"no such baseline: `{name}`", hint="baselines are: colocate")
    settings = rank.profile.schedule
    return schedule_from(
        name, early_groups=settings.early_groups, prefixes_in_flight=settings.prefixes_in_flight,
        advantages_wait=rank.profile.algorithm.advantage == "batch_std",
    )  # fmt: skip


def _lengths(rank: Rank, pair: int, group: int) -> list[int]:
    """Response lengths drawn evenly from 1 to the limit; a function of seed, pair and global group only."""
    rollout = rank.profile.rollout
    draw = random.Random(derive_seed(rank.profile.runtime.seed, "lengths", pair, rank.first_group + group))
    return [draw.randint(1, rollout.max_new_tokens) for _ in range(rollout.group_size)]


def _result(rank: Rank, rows: dict[str, list[dict[str, Any]]], request: dict[str, Any]) -> dict[str, Any]:
    own = rank.profile.schedule.name
    return {
        "results": [_summary(name, own, rows, str(request.get("workload") or rank.profile.name)) for name in rows],
        "hardware": _hardware(rank),
        "ranks": rank.peers.world_size,
        "pairs": len(rows[own]),
        "commit": _first_line(rank, "git"),
        "command": _first_line(rank, "command"),
        "raw": {
            name: [{"step_s": r["step_s"], "phase_s": r["phase_s"]} for r in own_rows]
            for name, own_rows in rows.items()
        },
    }


def _summary(name: str, own: str, rows: dict[str, list[dict[str, Any]]], workload: str) -> dict[str, Any]:
    times = [r["step_s"] for r in rows[name]]
    phases = sorted({phase for r in rows[name] for phase in r["phase_s"]})
    # A ratio per pair, then its median: both steps of a pair had the same prompts at nearly the same time.
    ratios = {
        other: [theirs["step_s"] / mine["step_s"] for theirs, mine in zip(rows[other], rows[name], strict=True)]
        for other in rows
        if other != own and name == own
    }
    return {
        "workload": workload,
        "schedule": name,
        "policy": "threads",
        "step_s_median": statistics.median(times),
        "step_s_spread": [min(times), max(times)],
        "phase_s": {p: statistics.median(r["phase_s"].get(p, 0.0) for r in rows[name]) for p in phases},
        "ratio": {other: statistics.median(values) for other, values in ratios.items()},
        "ratio_spread": {other: [min(values), max(values)] for other, values in ratios.items()},
        "response_tokens_mean": statistics.median(r["response_tokens_mean"] for r in rows[name]),
    }


def _hardware(rank: Rank) -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{os.cpu_count()} CPU cores, {platform.machine()}, {rank.profile.runtime.torch_threads} thread(s) a lane"


def _first_line(rank: Rank, what: str) -> str:
    path = getattr(rank.run, what)
    return path.read_text(encoding="utf-8").splitlines()[0] if path.exists() else "unknown"
