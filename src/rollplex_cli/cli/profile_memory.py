"""`rollplex profile-memory`: what lies in memory when, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollplex_cli.cli import options
from rollplex_cli.cli.output import print_json, set_json_mode, stdout_console
from rollplex_cli.core.errors import DoesNotFitError
from rollplex_cli.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from rollplex_cli.plan.build import Plan
    from rollplex_cli.plan.weights import WeightSharing


def profile_memory(
    profile: options.ProfileOption = options.DEFAULT_PROFILE,
    set_: options.SetOption = None,
    as_json: options.JsonOption = False,
    weights: Annotated[bool, typer.Option("--weights", help="Show how both engines share the weights.")] = False,
) -> None:
    """Print the memory plan of one rank, phase by phase.

    Upper bounds from the profile's limits. Exits 3 if the plan exceeds `memory.budget_gib`.
    """
    from rollplex_cli.plan.build import VALUE_BYTES, memory_summary

    set_json_mode(as_json)
    job, plan, _machine = options.load(profile, set_)
    if weights:
        _print_weights(plan, VALUE_BYTES[job.model.dtype], as_json=as_json)
        return
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


def _print_weights(plan: Plan, bytes_per_value: int, *, as_json: bool) -> None:
    from rollplex_cli.plan.weights import weight_sharing

    place = plan.topology
    sharing = weight_sharing(plan.model, place.train_tp, place.rollout_tp, bytes_per_value)
    if as_json:
        print_json(sharing.to_dict(plan.model))
        return
    console = stdout_console()
    console.print(_weights_table(plan, sharing))
    for line in _weights_lines(plan, sharing):
        console.print(line, markup=False, highlight=False)


def _weights_table(plan: Plan, sharing: WeightSharing) -> Table:
    from rich.table import Table
    from rich.text import Text

    title = Text(f"{plan.profile_name}: weights at train TP {sharing.train_tp}, rollout TP {sharing.rollout_tp}")
    table = Table(title=title, title_justify="left", box=None, header_style="bold", pad_edge=False)
    for column in ("parameters", "cut by", "training view"):
        table.add_column(column)
    for column in ("share", "on a rank", "received"):
        table.add_column(column, justify="right")
    total = sum(row.parameters for row in sharing.classes)
    for row in sharing.classes:
        received = format_bytes(row.received_bytes) if row.received_bytes else "-"
        share = f"{100 * row.parameters / total:.1f} %"
        table.add_row(row.name, row.split, row.kind, share, format_bytes(row.shard_bytes), received)
    return table


def _weights_lines(plan: Plan, sharing: WeightSharing) -> list[str]:
    from rollplex_cli.plan.weights import KINDS, PAPER, is_of_the_paper

    shares = " / ".join(f"{sharing.percent_of(kind):.1f}" for kind in KINDS)
    lines = [
        f"{' / '.join(KINDS)}: {shares} % of all parameters",
        f"extra     {format_bytes(sharing.extra_bytes)} a rank for the second view; a second copy would take "
        f"{format_bytes(sharing.second_copy_bytes)}",
        f"publish   {format_bytes(sharing.received_bytes)} received a rank, "
        f"{format_bytes(sharing.staging_bytes)} staged meanwhile",
    ]
    if is_of_the_paper(plan.model, sharing):
        percents = " / ".join(str(PAPER[f"{kind}_percent"]) for kind in KINDS)
        lines.append(
            f"paper     {percents} %, {PAPER['extra_gib']} GiB extra instead of {PAPER['second_copy_gib']} GiB"
        )
    return lines


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
