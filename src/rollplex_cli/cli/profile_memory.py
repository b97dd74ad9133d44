"""`rollplex profile-memory`: what lies in memory when, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex_cli.cli import options
from rollplex_cli.cli.output import print_json, set_json_mode, stdout_console
from rollplex_cli.core.errors import DoesNotFitError
from rollplex_cli.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from rollplex_cli.plan.build import Plan


def profile_memory(
    profile: options.ProfileOption = options.DEFAULT_PROFILE,
    set_: options.SetOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Print the memory plan of one rank, phase by phase.

    Upper bounds from the profile's limits. Exits 3 if the plan exceeds `memory.budget_gib`.
    """
    from rollplex_cli.plan.build import memory_summary

    set_json_mode(as_json)
    _job, plan, _machine = options.load(profile, set_)
    summary = memory_summary(plan)
    if as_json:
        print_json(summary)
    else:
        console = stdout_console()
        console.print(_table(plan))
        for line in _lines(plan, summary):
            console.print(line, markup=False, highlight=False)
    if not summary["fits"]:
        # The document on stdout already says so; a second one would not be JSON any more.
        set_json_mode(False)
        peak, budget = format_bytes(summary["peak_bytes"]), format_bytes(summary["budget_bytes"])
        raise DoesNotFitError(f"the plan's peak of {peak} exceeds `memory.budget_gib`: {budget}")


def _table(plan: Plan) -> Table:
    from rich.table import Table
    from rich.text import Text

    from rollplex_cli.plan.memory import PHASES

    title = Text(f"{plan.profile_name}: memory of one rank")
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    table.add_column("object")
    table.add_column("class", style="dim")
    for phase in PHASES:
        table.add_column(phase, justify="right")
    for item in plan.memory.objects:
        sizes = [format_bytes(item.phases[phase]) if phase in item.phases else "-" for phase in PHASES]
        table.add_row(item.name, item.cls, *sizes)
    table.add_section()
    table.add_row("total", "", *(format_bytes(plan.memory.phase_bytes(phase)) for phase in PHASES), style="bold")
    return table


def _lines(plan: Plan, summary: dict[str, Any]) -> list[str]:
    budget = "none" if summary["budget_bytes"] is None else format_bytes(summary["budget_bytes"])
    share = summary["peak_bytes"] / summary["naive_peak_bytes"]
    lines = [
        f"peak      {format_bytes(summary['peak_bytes'])} (budget: {budget})",
        f"naive     {format_bytes(summary['naive_peak_bytes'])} with everything resident, planned / naive {share:.2f}",
        f"host      {format_bytes(summary['host_bytes'])} a rank, {format_bytes(plan.node_host_bytes)} a node",
    ]
    if summary["update_s"] is not None:
        lines.append(f"update    {format_seconds(summary['update_s'])} to stream the optimizer over the host link")
    return lines
