"""`rollplex logs`: what a run prints."""

from __future__ import annotations

from typing import Annotated

import typer

from rollplex_cli.cli.jobs.status import RunArgument
from rollplex_cli.cli.output import print_text, printable
from rollplex_cli.core.errors import UsageError

LINES = 20


def logs(
    run: RunArgument,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with new lines until the run ends.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="Only this rank's log.")] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines of each log to begin with.")] = LINES,
) -> None:
    """Print the logs of a run: the job's, the preparation's, torchrun's and every rank's."""
    from rollplex_cli.launch.follow.logs import follow_logs, show_logs
    from rollplex_cli.launch.registry import find_runs

    found = find_runs(run)
    if len(found) > 1:
        raise UsageError(f"an array of {len(found)} runs, name one of them: `{run}`", hint=f"such as `{found[0].root}`")

    def write(line: str) -> None:
        print_text(printable(line) + "\n")

    (follow_logs if follow else show_logs)(found[0], write, rank=rank, num_lines=lines)
