"""The run behind `rollplex profile-memory --measure`."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any

from rollplex_cli.cli import options
from rollplex_cli.cli.train import run_job
from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.core.files import write_atomic
from rollplex_cli.core.log import talk

if TYPE_CHECKING:
    from pathlib import Path

    from rollplex_cli.plan.build import Plan
    from rollplex_cli.profile.schema import Profile

NUM_STEPS = 2
"""The last one is measured."""
ANY_DIFFERENCE = 1e9


def measure(job: Profile, plan: Plan, run_dir: Path | None, *, plain: bool) -> dict[str, dict[str, Any]]:
    """Run two steps of the job at its limits on this machine; what the second one held, see `measured_phases`.

    Raises:
        RollplexError: what the run ended with.
    """
    from rollplex_cli.report.memory.measured import measured_phases

    run = options.new_run(measured_job(job), plan, run_dir, sys.argv, prefix="memory-")
    write_atomic(run.measure, json.dumps({"steps": NUM_STEPS}) + "\n")
    talk(f"run folder: {run.root}")
    run_job(measured_job(job), plan, run, plain=plain)
    phases = measured_phases(run)
    if not phases:
        raise RunFailedError(f"the run measured nothing: `{run.root}`")
    return phases


def measured_job(job: Profile) -> Profile:
    """The profile as it is measured: weights without a cold start, nothing to reach, nothing that stops it."""
    init = "random" if job.model.init == "cold_start" else job.model.init
    return dataclasses.replace(
        job,
        model=dataclasses.replace(job.model, init=init),
        target=None,
        runtime=dataclasses.replace(job.runtime, max_steps=NUM_STEPS),
        guards=dataclasses.replace(job.guards, parity_limit=ANY_DIFFERENCE),
    )
