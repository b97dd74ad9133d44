"""`rollplex bench`: a schedule against its baselines on the same prompts and lengths."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollplex_cli.cli import options
from rollplex_cli.cli.ablations import Ablation, require_ablations
from rollplex_cli.cli.output import print_json, set_json_mode, stdout_console
from rollplex_cli.cli.train import run_job
from rollplex_cli.core.errors import RollplexError, RunFailedError, UsageError
from rollplex_cli.core.files import read_json, write_atomic
from rollplex_cli.core.log import talk
from rollplex_cli.profile.sharing import KNOWN, parse_policy

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder
    from rollplex_cli.plan.build import Plan
    from rollplex_cli.profile.schema import Profile

NUM_WARM_UP_STEPS = 1
"""Steps of each schedule that the benchmark takes before it measures, and of one before each further workload."""


class Baseline(StrEnum):
    """Schedules to compare with."""

    colocate = "colocate"
    colocate_same_work = "colocate_same_work"
    disagg = "disagg"


class WorkloadName(StrEnum):
    """Workload shapes that `--workload` takes; `plan.workloads` has their lengths."""

    star = "star"
    clevrer = "clevrer"
    perceptiontest = "perceptiontest"
    llava_video = "llava-video"
    math = "math"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Apart:
    """A part of a benchmark that needs engines of its own, as one variant."""

    name: str
    """Of the variant, and of its run folder in that of the benchmark."""
    what: str
    job: Profile
    plan: Plan


def bench(
    profile: options.ProfileOption = options.DEFAULT_PROFILE,
    baseline: Annotated[
        list[Baseline] | None,
        typer.Option("--baseline", help="Repeatable [default: colocate; none with several policies]."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Measured steps of each schedule.")] = 10,
    workload: Annotated[
        list[WorkloadName] | None,
        typer.Option(
            "--workload", help="Prompt and response lengths; repeatable [default: the task's prompts, even lengths]."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", help="Sharing policy, as `schedule.policy`; repeatable [default: the profile's]."),
    ] = None,
    ablate: Annotated[list[Ablation] | None, typer.Option("--ablate", help="Repeatable.")] = None,
    set_: options.SetOption = None,
    run_dir: options.RunDirOption = None,
    plain: options.PlainOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Measure the profile's schedule against baselines, alternating step by step.

    `disagg`, in which half of the ranks decode and half train, and `matched-tp`, a rollout of the trainer's degree,
    take the same steps in processes of their own, afterwards.
    """
    from rollplex_cli.report.bench import print_bench

    set_json_mode(as_json)
    policies = list(dict.fromkeys(policy or []))
    _check_policies(policies)
    overrides = [*(set_ or []), *(f"schedule.policy={name}" for name in policies[:1])]
    job, plan, machine = options.load(profile, overrides)
    if job.schedule.name != "rollplex":
        raise UsageError(
            f"`schedule.name: {job.schedule.name}` is a baseline here, measured beside the schedule that overlaps",
            hint=f"set `schedule.name` to `rollplex` and add `--baseline {job.schedule.name}`",
        )
    # Before anything runs: what cannot be measured is said at once.
    options.require_fit(plan, machine)
    left_out = list(dict.fromkeys(ablate or []))
    require_ablations(job, plan, machine, policies, left_out)
    baselines = list(dict.fromkeys(baseline or ([Baseline.colocate] if len(policies) < 2 else [])))
    apart = _apart(job, profile, overrides, baselines, left_out)
    names = [str(name) for name in baselines if name is not Baseline.disagg]
    workloads = list(dict.fromkeys(str(name) for name in workload or []))
    ablations = [str(name) for name in left_out if name is not Ablation.matched_tp]
    variants = len(names) + max(1, len(policies)) + len(ablations)
    job = _bench_job(job, variants, len(workloads), steps)
    request = {
        "baselines": names,
        "steps": steps,
        "workloads": workloads,
        "policies": policies,
        "ablations": ablations,
    }
    run = options.new_run(job, plan, run_dir, sys.argv, prefix="bench-")
    write_atomic(run.bench, json.dumps(request) + "\n")
    talk(f"run folder: {run.root}")
    quiet = plain or as_json
    try:
        run_job(job, plan, run, plain=quiet)
        result = _result(run)
        for part in apart:
            alone = {"name": part.name, "baselines": [], "policies": [], "ablations": []}
            request = {**request, **alone, "beside": str(run.bench_result.resolve())}
            part = dataclasses.replace(part, job=_bench_job(part.job, 1, len(workloads), steps))
            result = _measure_apart(part, run, request, plain=quiet)
    except RollplexError:
        if (done := read_json(run.bench_result)) is not None:
            talk(f"measured before that: {run.bench_result}")
            if not as_json:
                print_bench(done, stdout_console())
        raise
    if as_json:
        print_json(result)
    else:
        print_bench(result, stdout_console())


def _apart(
    job: Profile, profile: str, overrides: list[str], baselines: list[Baseline], ablations: list[Ablation]
) -> list[_Apart]:
    """Parts that need engines of their own.

    Raises:
        UsageError: the ranks cannot be halved.
        DoesNotFitError: a part does not fit this machine.
    """
    wanted: list[tuple[str, str, list[str]]] = []
    if Baseline.disagg in baselines:
        if job.num_ranks % 2:
            raise UsageError(
                f"`--baseline disagg`: got {job.num_ranks} rank(s), expected an even number: half decode, half train",
                hint="set `topology.ranks_per_node`, or leave it out",
            )
        wanted.append((Baseline.disagg, "half of the ranks decode, half train", _halved(job)))
    if Ablation.matched_tp in ablations:
        degree = job.topology.train_tp
        wanted.append((Ablation.matched_tp, f"rollout of TP {degree}", [f"topology.rollout_tp={degree}"]))
    found = []
    for name, what, changes in wanted:
        own, plan, machine = options.load(profile, [*overrides, *changes])
        options.require_fit(plan, machine)
        found.append(_Apart(name=name, what=what, job=own, plan=plan))
    return found


def _result(run: RunFolder) -> dict[str, Any]:
    result: dict[str, Any] | None = read_json(run.bench_result)
    if result is None:
        raise RunFailedError(f"the benchmark left no result: `{run.bench_result}`")
    return result


def _halved(job: Profile) -> list[str]:
    """Overrides that give half of the ranks to each role, at the job's degrees as far as they divide the half."""
    half = max(1, job.num_ranks // 2)
    train_tp = math.gcd(job.topology.train_tp, half)
    rollout_tp = math.gcd(job.topology.rollout_tp, train_tp)
    degrees = (f"topology.train_tp={train_tp}", f"topology.rollout_tp={rollout_tp}")
    # As a baseline it reuses nothing, and a profile with this switch would be refused.
    return ["schedule.name=disagg", "schedule.policy=serial", "reuse.vision=false", *degrees]


def _measure_apart(part: _Apart, beside: RunFolder, request: dict[str, Any], *, plain: bool) -> dict[str, Any]:
    """Run `request` in processes of its own, on the data and base of another benchmark; its result with this one's."""
    run = options.new_run(part.job, part.plan, beside.bench_apart(part.name).resolve(), sys.argv)
    write_atomic(run.bench, json.dumps(request) + "\n")
    run.data_dir.rmdir()
    for own, theirs in ((run.data_dir, beside.data_dir), (run.base_dir, beside.base_dir)):
        own.symlink_to(theirs.resolve(), target_is_directory=True)
    shutil.copy(beside.prepare_status, run.prepare_status)
    talk(f"{part.what}: {run.root}")
    run_job(part.job, part.plan, run, plain=plain)
    result = _result(run)
    write_atomic(beside.bench_result, json.dumps(result, indent=2) + "\n")
    return result


def _check_policies(policies: list[str]) -> None:
    for name in policies:
        try:
            policy = parse_policy(name)
        except ValueError as error:
            hint = f"policies are: {', '.join(KNOWN)}"
            raise UsageError(f"`--policy`: got `{name}`, {error}", hint=hint) from None
        if policy.decode_percent is not None and len(policies) > 1:
            raise UsageError(
                f"`--policy {name}` confines decode for a whole run, and cannot alternate with others",
                hint="run it alone",
            )


def _bench_job(job: Profile, num_variants: int, num_workloads: int, steps: int) -> Profile:
    """The profile as a benchmark runs it: no target to miss, and as many steps as will be taken."""
    further = max(0, num_workloads - 1)
    warm_up = NUM_WARM_UP_STEPS * (num_variants + further)
    num_steps = warm_up + num_variants * steps * (1 + further)
    return dataclasses.replace(job, target=None, runtime=dataclasses.replace(job.runtime, max_steps=num_steps))
