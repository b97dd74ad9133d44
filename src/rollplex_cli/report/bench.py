"""The result of a benchmark as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from rollplex_cli.report.series import number, printable, show

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

RATIOS = ("colocate", "colocate_same_work", "disagg")


def print_bench(result: dict[str, Any], console: Console) -> None:
    """Print the contents of bench_result.json."""
    console.print(bench_table(result))


def bench_table(result: dict[str, Any]) -> RenderableType:
    """The contents of bench_result.json as a table, what it was measured on below.

    `ratio` of a baseline is its median step time over this row's: above 1 this row is faster.
    """
    rows = [row for row in result.get("results", []) if isinstance(row, dict)]
    phases = list(dict.fromkeys(name for row in rows for name in _names(row, "phase_s")))
    found = dict.fromkeys(name for row in rows for name in _names(row, "ratio"))
    ratios = sorted(found, key=lambda name: (RATIOS.index(name) if name in RATIOS else len(RATIOS), name))
    table = Table(title="Seconds a step, median", title_justify="left")
    for heading in ("workload", "schedule", "policy"):
        table.add_column(heading)
    for heading in ("step s", "spread", *phases, *(f"x {name}" for name in ratios)):
        table.add_column(Text(printable(heading)), justify="right")
    for row in rows:
        table.add_row(
            *(Text(printable(row.get(key, "-"))) for key in ("workload", "schedule", "policy")),
            show(number(row, "step_s_median")),
            _spread(row.get("step_s_spread")),
            *(show(number(row, f"phase_s.{name}")) for name in phases),
            *(show(number(row, f"ratio.{name}"), ".2f") for name in ratios),
        )
    facts = [f"{key}: {result[key]}" for key in ("hardware", "commit", "command") if result.get(key)]
    return Group(table, *(Text(printable(fact)) for fact in facts))


def _spread(value: object) -> str:
    """`lowest .. highest` of a pair, else the number itself."""
    if isinstance(value, list) and len(value) == 2:
        return " .. ".join(show(number({"end": end}, "end")) for end in value)
    return show(number({"spread": value}, "spread"))


def _names(row: dict[str, Any], key: str) -> list[str]:
    parts = row.get(key)
    return [str(name) for name in parts] if isinstance(parts, dict) else []
