"""`rollplex report`: tables and pictures of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollplex_cli.cli import options
from rollplex_cli.cli.output import set_json_mode, stdout_console


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    as_json: options.JsonOption = False,
) -> None:
    """Print the tables of a run and write its pictures to `RUN/report/`."""
    from rollplex_cli.launch.run_folder import reopen_run
    from rollplex_cli.report.run import render

    set_json_mode(as_json)
    render(reopen_run(run).root, stdout_console(), json=as_json)
