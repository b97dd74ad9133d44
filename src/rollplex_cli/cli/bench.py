"""`rollplex bench`: a schedule against its baselines on the same prompts and lengths."""

from __future__ import annotations

import dataclasses
import json
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from rollplex_cli.cli import options
from rollplex_cli.cli.output import print_json, set_json_mode, stdout_console
from rollplex_cli.cli.train import run_job
from rollplex_cli.core.errors import RunFailedError, UsageError
from rollplex_cli.core.files import read_json, write_atomic
from rollplex_cli.core.log import talk
from rollplex_cli.profile.sharing import parse_policy

if TYPE_CHECKING:
    from rollplex_cli.profile.schema import Profile

NUM_WARM_UP_STEPS = 1
"""Steps of each schedule that the benchmark takes before it measures."""


class Baseline(StrEnum):
    """Schedules to compare with."""

    colocate = "colocate"
    colocate_same_work = "colocate_same_work"


class WorkloadName(StrEnum):
    """Workload shapes that `--workload` takes; `plan.workloads` has their lengths."""

    star = "star"
    clevrer = "clevrer"
    perceptiontest = "perceptiontest"
    llava_video = "llava-video"
    math = "math"


class Ablation(StrEnum):
    """What `--ablate` leaves out of the overlap."""

    reference_overlap = "reference-overlap"
    actor_overlap = "actor-overlap"
    early_groups = "early-groups"


def bench(
    profile: options.ProfileOption = options.DEFAULT_PROFILE,
    baseline: Annotated[list[Baseline] | None, typer.Option("--baseline", help="Repeatable.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Measured steps of each schedule.")] = 10,
    workload: Annotated[
        WorkloadName | None,
        typer.Option("--workload", help="Prompt and response lengths [default: the task's prompts, even lengths]."),
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
    """Measure the profile's schedule against baselines, alternating step by step."""
    from rollplex_cli.report.bench import print_bench

    set_json_mode(as_json)
    policies = list(policy or [])
    overrides = [*(set_ or []), *(f"schedule.policy={name}" for name in policies[:1])]
    job, plan, machine = options.load(profile, overrides)
    _check_policies(policies)
    options.require_fit(plan, machine)
    names = [str(name) for name in baseline or [Baseline.colocate]]
    job = _bench_job(job, len(set(names)) + max(1, len(policies)) + len(ablate or []), steps)
    request = {
        "baselines": names,
        "steps": steps,
        "workload": workload and str(workload),
        "policies": policies,
        "ablations": [str(name) for name in ablate or []],
    }
    run = options.new_run(job, plan, run_dir, sys.argv, prefix="bench-")
    write_atomic(run.bench, json.dumps(request) + "\n")
    talk(f"run folder: {run.root}")
    run_job(job, plan, run, plain=plain or as_json)
    result = read_json(run.bench_result)
    if result is None:
        raise RunFailedError(f"the benchmark left no result: `{run.bench_result}`")
    if as_json:
        print_json(result)
    else:
        print_bench(result, stdout_console())


def _check_policies(policies: list[str]) -> None:
    for name in policies:
        try:
            policy = parse_policy(name)
        except ValueError as error:
            raise UsageError(f"`--policy`: got `{name}`, {error}") from None
        if policy.decode_percent is not None and len(policies) > 1:
            raise UsageError(
                f"`--policy {name}` confines decode for a whole run, and cannot alternate with others",
                hint="run it alone",
            )


def _bench_job(job: Profile, num_variants: int, steps: int) -> Profile:
    """The profile as a benchmark runs it: no target to miss, and as many steps as will be taken."""
    num_steps = num_variants * (NUM_WARM_UP_STEPS + steps)
    return dataclasses.replace(job, target=None, runtime=dataclasses.replace(job.runtime, max_steps=num_steps))
