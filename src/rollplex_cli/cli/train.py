"""`rollplex train`: profile -> plan -> run folder -> supervised processes."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollplex_cli.cli import options
from rollplex_cli.cli.output import print_json, set_json_mode
from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.files import read_jsonl
from rollplex_cli.core.log import talk

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder
    from rollplex_cli.plan.build import Plan
    from rollplex_cli.profile.schema import Profile


class Schedule(StrEnum):
    """Schedules that `--schedule` takes."""

    rollplex = "rollplex"
    colocate = "colocate"
    disagg = "disagg"


def train(
    profile: options.ProfileOption = options.DEFAULT_PROFILE,
    set_: options.SetOption = None,
    run_dir: options.RunDirOption = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in `--run-dir`.")] = False,
    max_steps: Annotated[int | None, typer.Option("--max-steps", help="Same as `--set runtime.max_steps=N`.")] = None,
    schedule: Annotated[Schedule | None, typer.Option("--schedule", help="Same as `--set schedule.name=S`.")] = None,
    plain: options.PlainOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Train a model by reinforcement learning.

    Writes everything about the run to its folder; `rollplex report RUN` reads it again. A run continues from
    its newest checkpoint with `--resume --run-dir RUN`, then with the profile stored there.
    """
    set_json_mode(as_json)
    overrides = list(set_ or [])
    overrides += [f"runtime.max_steps={max_steps}"] if max_steps is not None else []
    overrides += [f"schedule.name={schedule}"] if schedule is not None else []
    name = str(_stored_profile(run_dir)) if resume else profile
    job, plan, machine = options.load(name, overrides)
    options.require_fit(plan, machine)
    if resume and run_dir is not None:
        run = _reopen(job, plan, run_dir)
    else:
        run = options.new_run(job, plan, run_dir, sys.argv)
    talk(f"run folder: {run.root}")
    run_job(job, plan, run, plain=plain or as_json)
    if as_json:
        print_json(_result(run))


def run_job(job: Profile, plan: Plan, run: RunFolder, *, plain: bool) -> None:
    """Run a job under the live view. Raises the reason it ended with, if any."""
    from rollplex_cli.launch.supervise import supervise
    from rollplex_cli.report.live import LiveView

    title = f"{job.name}: {plan.model.name}, {plan.topology.num_ranks} ranks, schedule {job.schedule.name}"
    with LiveView(run, title, job.runtime.max_steps, job.target, plain=plain) as view:
        supervise(job, plan, run, on_tick=view.poll)


def _stored_profile(run_dir: Path | None) -> Path:
    from rollplex_cli.launch.run_folder import reopen_run

    if run_dir is None:
        runs = sorted(options.RUNS.glob("*/profile.yaml"), key=lambda path: path.stat().st_mtime)
        hint = f"the newest run here is `--run-dir {runs[-1].parent}`" if runs else None
        raise UsageError("`--resume` needs `--run-dir`", hint=hint)
    return reopen_run(run_dir).profile


def _reopen(job: Profile, plan: Plan, run_dir: Path) -> RunFolder:
    from rollplex_cli.launch.run_folder import lock_run, reopen_run, resume_run
    from rollplex_cli.profile.dump import resolved_yaml

    run = reopen_run(run_dir)
    if run.bench.exists() or run.measure.exists():
        raise UsageError(
            f"`{run_dir}` holds a benchmark or a measurement, which is not continued",
            hint="start it again with another `--run-dir`",
        )
    # Another supervisor's profile must not change under it.
    lock = lock_run(run)
    try:
        resume_run(run, profile_yaml=resolved_yaml(job), plan_json=plan.to_json(), argv=sys.argv)
    finally:
        lock.release()
    return run


def _result(run: RunFolder) -> dict[str, object]:
    rows = read_jsonl(run.metrics)
    return {"run_dir": str(run.root), "exit_code": 0, "num_steps": len(rows), "last": rows[-1] if rows else None}
