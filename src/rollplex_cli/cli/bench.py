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
from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.core.files import read_json, write_atomic
from rollplex_cli.core.log import talk

if TYPE_CHECKING:
    from rollplex_cli.profile.schema import Profile

NUM_WARM_UP_STEPS = 1
"""Steps of each schedule that the benchmark takes before it measures."""


class Baseline(StrEnum):
    """Schedules to compare with."""

    colocate = "colocate"


def bench(
    profile: options.ProfileOption = options.DEFAULT_PROFILE,
    baseline: Annotated[list[Baseline] | None, typer.Option("--baseline", help="Repeatable.")] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Measured steps of each schedule.")] = 10,
    workload: Annotated[
        str | None, typer.Option("--workload", help="Recorded lengths to replay [default: the profile's own rollouts].")
    ] = None,
    set_: options.SetOption = None,
    run_dir: options.RunDirOption = None,
    plain: options.PlainOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Measure the profile's schedule against baselines, alternating step by step."""
    from rollplex_cli.report.bench import print_bench

    set_json_mode(as_json)
    job, plan, machine = options.load(profile, set_)
    options.require_fit(plan, machine)
    names = [str(name) for name in baseline or [Baseline.colocate]]
    job = _bench_job(job, names, steps)
    run = options.new_run(job, plan, run_dir, sys.argv, prefix="bench-")
    write_atomic(run.bench, json.dumps({"baselines": names, "steps": steps, "workload": workload}) + "\n")
    talk(f"run folder: {run.root}")
    run_job(job, plan, run, plain=plain or as_json)
    result = read_json(run.bench_result)
    if result is None:
        raise RunFailedError(f"the benchmark left no result: `{run.bench_result}`")
    if as_json:
        print_json(result)
    else:
        print_bench(result, stdout_console())


def _bench_job(job: Profile, baselines: list[str], steps: int) -> Profile:
    """The profile as a benchmark runs it: no target to miss, and as many steps as will be taken."""
    schedules = {job.schedule.name, *baselines}
    num_steps = len(schedules) * (NUM_WARM_UP_STEPS + steps)
    return dataclasses.replace(job, target=None, runtime=dataclasses.replace(job.runtime, max_steps=num_steps))
