"""The memory plan as tables and lines of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex_cli.core.units import GIB, MIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    Summary = Mapping[str, Any]
    """`plan.build.memory_summary`, or the same read back from `plan.json`."""


def plan_table(summary: Summary, title: str) -> Table:
    """Objects by moment of a step, with the budget's excess marked."""
    from rich.text import Text

    moments = summary["moments"]
    unit, name = (GIB, "GiB") if summary["peak_bytes"] >= 4 * GIB else (MIB, "MiB")
    table = new_table(Text(f"{title}, {name} at each moment of a step"))
    table.add_column("object", no_wrap=True)
    phase = ""
    for moment in moments:
        shown = "" if moment["phase"] == phase else moment["phase"]
        phase = moment["phase"]
        table.add_column(Text("\n".join([shown, *_heading(moment["name"])])), justify="right")
    sizes = {(o["name"], i): o["bytes"] for i, m in enumerate(moments) for o in m["objects"]}
    for key in object_names(moments):
        cells = [sizes.get((key, i)) for i in range(len(moments))]
        table.add_row(key, *("-" if size is None else _number(size, unit) for size in cells))
    table.add_section()
    budget = summary["budget_bytes"]
    counts = budget is not None and summary["budgeted_bytes"] == summary["peak_bytes"]
    totals = [
        Text(_number(m["bytes"], unit), style="bold red" if counts and m["bytes"] > budget else "bold") for m in moments
    ]
    table.add_row(Text("total", style="bold"), *totals)
    return table


def object_names(moments: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every object of some moments, in the order of the lifetime table."""
    from rollplex_cli.plan.memory.objects import CLASSES

    present = {item["name"] for moment in moments for item in moment["objects"]}
    return [name for name in CLASSES if name in present]


def ablation_table(summary: Summary) -> Table:
    """What leaving a measure out costs."""
    table = new_table("Without one of the measures")
    table.add_column("left out")
    for heading in ("peak", "more than planned", "phase", "budget"):
        table.add_column(heading, justify="right")
    for row in summary["ablations"]:
        largest = " ".join(p["name"] for p in row["phases"] if p["peak_bytes"] == row["peak_bytes"])
        largest = largest if " " not in largest else "all"
        extra = format_bytes(row["extra_bytes"]) if row["extra_bytes"] else "nothing"
        verdict = "-" if summary["budget_bytes"] is None else "fits" if row["fits"] else "does not fit"
        table.add_row(row["name"], format_bytes(row["peak_bytes"]), extra, largest, verdict)
    return table


def plan_lines(summary: Summary, *, node_host_bytes: int) -> list[str]:
    """What the table does not say: verdict, capacity, host, link."""
    peak, budget = summary["peak_bytes"], summary["budget_bytes"]
    moment = max(summary["moments"], key=lambda m: m["bytes"])
    if budget is None:
        verdict = "no `memory.budget_gib`"
    else:
        left = budget - summary["budgeted_bytes"]
        spare = f"{format_bytes(left)} to spare" if left >= 0 else f"{format_bytes(-left)} too much"
        what = "" if summary["budgeted_bytes"] == peak else f"{format_bytes(summary['budgeted_bytes'])} in regions "
        verdict = f"{what}{'fits' if left >= 0 else 'does not fit'} into {format_bytes(budget)}, {spare}"
    lines = [
        f"peak      {format_bytes(peak)} in {moment['phase']} ({moment['name']}): {verdict}",
        f"naive     {format_bytes(summary['naive_peak_bytes'])} with everything resident, planned / naive "
        f"{peak / summary['naive_peak_bytes']:.2f}",
    ]
    early = summary.get("early_groups")
    if early and early["on_peak_bytes"] != early["off_peak_bytes"]:
        lines.append(
            f"early     with groups trained beside decode: {format_bytes(early['on_peak_bytes'])}, after it: "
            f"{format_bytes(early['off_peak_bytes'])}"
        )
    lines.append(
        f"KV pool   {summary['kv_tokens']:,} tokens: {summary['kv_sequences']} sequences at their longest with prompts "
        f"shared, {summary['kv_separate_sequences']} without; a replica's step has up to "
        f"{summary['kv_needed_tokens']:,} tokens"
    )
    parts = ", ".join(
        f"{item['name']} {format_bytes(item['bytes'])}{' pinned' if item['pinned'] else ''}"
        for item in summary["host_objects"]
    )
    lines.append(
        f"host      {format_bytes(summary['host_bytes'])} a rank ({parts}), {format_bytes(node_host_bytes)} a node"
    )
    if summary["update_s"] is not None:
        lines.append(f"update    {format_seconds(summary['update_s'])} to stream the optimizer over the host link")
    if found := summary.get("longest_sample"):
        lines.append(
            f"data      the longest of {found['num_checked']} prompts has {found['tokens']:,} tokens "
            f"(`{found['sample_id']}`): {format_bytes(found['peak_bytes'])} at the peak with it"
        )
    return lines


def _heading(moment: str) -> list[str]:
    """Lines of a column's heading, short enough for eight columns on a terminal of 80."""
    return moment.replace("reference", "ref.").replace("backward", "back").replace(",", "").split()


def new_table(title: Any) -> Table:
    """A table in the style of the planner's output."""
    from rich.table import Table

    style: dict[str, Any] = {"box": None, "header_style": "bold", "pad_edge": False, "collapse_padding": True}
    return Table(title=title, title_justify="left", **style)


def _number(size: int, unit: int) -> str:
    value = size / unit
    return f"{value:.1f}" if value >= 0.05 else f"{value:.2f}" if value >= 0.005 else "0.0"
