"""The result of a benchmark as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rollplex_cli.core.units import format_bytes
from rollplex_cli.report.series import number, printable, show

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console, RenderableType

RATIOS = ("colocate", "colocate_same_work", "disagg")

FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("tokens_per_s", "tokens/s", "{:,.0f}".format),
    ("peak_bytes", "peak memory", lambda value: format_bytes(int(value))),
    ("bound_ratio", "times the least step", "{:.2f}".format),
    ("logprob_diff_mean", "log-prob difference", "{:.1e}".format),
)
"""Key of a result's row, title, and how a value is shown; left out where no row has it."""


def print_bench(result: dict[str, Any], console: Console) -> None:
    """Print the contents of bench_result.json."""
    console.print(bench_table(result))


def bench_table(result: dict[str, Any]) -> RenderableType:
    """One table per workload with a column per schedule and policy, what it was measured on below.

    `ratio` of a baseline is the median of its step time over this column's, pair by pair: above 1 this one is faster.
    Below it the 95 % confidence interval of the mean (`runtime.bench.result.ratio_interval`), whose lower end is what
    has been shown, and the extremes of the pairs.
    """
    rows = [row for row in result.get("results", []) if isinstance(row, dict)]
    workloads = list(dict.fromkeys(printable(row.get("workload", "-")) for row in rows))
    tables: list[RenderableType] = [
        _workload(name, [r for r in rows if printable(r.get("workload", "-")) == name]) for name in workloads
    ]
    facts = [f"{key}: {result[key]}" for key in ("hardware", "ranks", "pairs", "commit", "command") if result.get(key)]
    several = result.get("workloads")
    parts = {f"{name}: ": part for name, part in several.items()} if isinstance(several, dict) else {"": result}
    for name, part in parts.items():
        if (launch := number(part, "launch_us")) is not None:
            facts.append(f"{name}an operation takes the host {launch:.0f} microseconds to issue")
        if (bound := number(part, "bound_s")) is not None:
            facts.append(f"{name}no step takes less than {bound:.3f} s (decode alone, or all operations)")
        facts += [f"{name}{fact}" for fact in (*_co_run(part), *_update(part))]
    return Group(*(tables or [Text("no results")]), *(Text(printable(fact)) for fact in facts))


def _co_run(result: dict[str, Any]) -> list[str]:
    """How much decode and trainer do together of what they do in turn, at every batch and number of fenced SMs."""
    rows = [row for row in result.get("co_run") or [] if isinstance(row, dict)]
    found: dict[object, list[str]] = {}
    for row in rows:
        efficiency, watts, clock = number(row, "efficiency"), number(row, "watts"), number(row, "sm_mhz")
        if efficiency is not None:
            power = f" at {watts:.0f} W, {clock:.0f} MHz" if watts is not None and clock is not None else ""
            fence = row.get("reserved_sms")
            text = f"{efficiency:.2f} {f'with {fence} SMs fenced' if fence else 'by priority'}{power}"
            found.setdefault(row.get("batch"), []).append(text)
    return [f"co-run efficiency at {batch} responses: {', '.join(texts)}" for batch, texts in found.items()]


def _update(result: dict[str, Any]) -> list[str]:
    """What the optimizer's update moved over the link to the host, and how near to the link's rate."""
    moved, back = number(result, "update.to_device_bytes"), number(result, "update.to_host_bytes")
    seconds, both = number(result, "update.update_s_median"), number(result, "update.link.both")
    least, ratio = number(result, "update.link_s"), number(result, "update.ratio")
    if not moved or back is None or seconds is None or both is None or least is None or ratio is None:
        return []
    return [
        f"update: {seconds:.3f} s for {format_bytes(moved)} to the device and {format_bytes(back)} back; the link, "
        f"{both / 1e9:.1f} GB/s both ways together, allows {least:.3f} s: {ratio:.2f} times that"
    ]


def _workload(name: str, rows: list[dict[str, Any]]) -> Table:
    table = Table(title=Text(f"workload {name}"), title_justify="left")
    table.add_column("seconds, median", overflow="fold")
    for row in rows:
        policy = row.get("policy")
        name = printable(row.get("variant") or row.get("schedule", "-")) + (f"\n{printable(policy)}" if policy else "")
        table.add_column(Text(name, overflow="fold"), justify="right", overflow="fold")
    table.add_row("step", *(show(number(row, "step_s_median")) for row in rows))
    table.add_row("  lowest .. highest", *(_spread(row.get("step_s_spread")) for row in rows))
    for phase in dict.fromkeys(name for row in rows for name in _names(row, "phase_s")):
        table.add_row(Text(f"  {printable(phase)}"), *(show(number(row, f"phase_s.{phase}")) for row in rows))
    for key, title, form in FIGURES:
        values = [number(row, key) for row in rows]
        if any(value is not None for value in values):
            table.add_row(title, *("-" if value is None else form(value) for value in values))
    found = dict.fromkeys(name for row in rows for name in _names(row, "ratio"))
    for baseline in sorted(found, key=lambda n: (RATIOS.index(n) if n in RATIOS else len(RATIOS), n)):
        table.add_row(
            Text(f"times {printable(baseline)}'s speed"),
            *(show(number(row, f"ratio.{baseline}"), ".2f") for row in rows),
        )
        table.add_row("  95 % interval", *(_spread(_part(row, "ratio_ci95", baseline)) for row in rows))
        table.add_row("  lowest .. highest", *(_spread(_part(row, "ratio_spread", baseline)) for row in rows))
    return table


def _part(row: dict[str, Any], key: str, name: str) -> object:
    parts = row.get(key)
    return parts.get(name) if isinstance(parts, dict) else None


def _spread(value: object) -> str:
    """`lowest .. highest` of a pair, else the number itself."""
    if isinstance(value, list) and len(value) == 2:
        return " .. ".join(show(number({"end": end}, "end")) for end in value)
    return show(number({"spread": value}, "spread"))


def _names(row: dict[str, Any], key: str) -> list[str]:
    parts = row.get(key)
    return [str(name) for name in parts] if isinstance(parts, dict) else []
