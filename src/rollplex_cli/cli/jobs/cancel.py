"""`rollplex cancel`: end a run."""

from __future__ import annotations

from typing import Annotated

import typer

from rollplex_cli.cli.jobs.status import RunArgument
from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.log import talk


def cancel(
    run: RunArgument,
    now: Annotated[bool, typer.Option("--now", help="At once: what came after the last checkpoint is lost.")] = False,
) -> None:
    """Stop a run after its step, with a checkpoint; of an array, every run that goes on."""
    from rollplex_cli.launch.follow.cancel import cancel_run
    from rollplex_cli.launch.registry import find_runs

    found = find_runs(run)
    done, refused = [], []
    for folder in found:
        try:
            done.append(cancel_run(folder, now=now))
        except UsageError as error:
            refused.append(error)
    if not done:
        raise refused[0]
    for line in done:
        talk(line)
