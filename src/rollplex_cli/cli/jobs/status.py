"""`rollplex status`: what a run does."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from rollplex_cli.cli import options
from rollplex_cli.cli.output import print_json, print_text, printable, set_json_mode
from rollplex_cli.core.units import format_seconds

if TYPE_CHECKING:
    from rollplex_cli.launch.follow.status import RunStatus

RunArgument = Annotated[str, typer.Argument(metavar="RUN|JOB", help="A run folder, a run's name, or a job id.")]


def status(run: RunArgument, as_json: options.JsonOption = False) -> None:
    """Show the state of a run: where it is, how long it will take, the last reward, the last error."""
    from rollplex_cli.launch.follow.status import run_status
    from rollplex_cli.launch.registry import find_runs

    set_json_mode(as_json)
    found = [run_status(folder) for folder in find_runs(run)]
    if as_json:
        rows = [dataclasses.asdict(state) for state in found]
        print_json(rows[0] if len(rows) == 1 else rows)
        return
    print_text("\n\n".join(printable("\n".join(lines_of(state))) for state in found))


def lines_of(state: RunStatus) -> list[str]:
    """A run's state as people read it."""
    job = f", job {state.job_id}" if state.job_id else ""
    again = f", started again {state.restarts} times" if state.restarts else ""
    lines = [
        f"run      {state.run}{job}{again}",
        f"state    {state.state}" + (f": {state.detail}" if state.detail else ""),
    ]
    total = f" of at most {state.max_steps}" if state.max_steps is not None else ""
    left = f", at most {format_seconds(state.eta_s)} left" if state.eta_s is not None else ""
    lines.append(f"step     {state.step}{total}{left}")
    if state.reward_mean is not None:
        lines.append(f"reward   {state.reward_mean:.4f} in the last step")
    if state.error and state.error != state.detail:
        lines.append(f"error    {state.error}")
    if state.hint:
        lines.append(f"hint     {state.hint}")
    lines += [f"waits    {item}" for item in state.waiting]
    lines += [f"warning  {item}" for item in state.warnings]
    return lines
