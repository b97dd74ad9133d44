"""The memory plan against what a run measured: per phase, and per object where both sides know it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.units import format_bytes
from rollplex_cli.report.memory.tables import new_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

TOLERANCE = 0.05
"""Share of the plan by which a phase's measured peak may differ."""
TOGETHER = "activations_and_caches"
"""What a run measures as one: whatever PyTorch gave out that has no name of its own."""
PYTORCHS = (
    "vision_cache",
    "rollout_workspace",
    "boundary_gradients",
    "prefix_activations",
    "suffix_activations",
    "optimizer_chunks",
    "publish_staging",
)
"""Planned objects that are part of it unless they were measured by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectComparison:
    """One object in one phase; None where a side does not have it."""

    name: str
    planned_bytes: int | None
    measured_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseComparison:
    """One phase."""

    name: str
    planned_bytes: int
    measured_bytes: int
    objects: tuple[ObjectComparison, ...]

    @property
    def ratio(self) -> float:
        """Measured by planned peak."""
        return self.measured_bytes / self.planned_bytes

    @property
    def within_tolerance(self) -> bool:
        """Whether the plan holds."""
        return abs(self.ratio - 1) <= TOLERANCE


def compare(summary: Mapping[str, Any], measured: Mapping[str, Mapping[str, Any]]) -> list[PhaseComparison]:
    """Put both sides together.

    Args:
        summary: `plan.build.memory_summary`, or `memory` of a `plan.json`.
        measured: by phase, `peak_bytes` and `objects` (bytes by name, each at its largest). Phases that were not
            measured are left out.
    """
    found = []
    for phase in summary["phases"]:
        seen = measured.get(phase["name"])
        if seen is None:
            continue
        actual = {name: int(size) for name, size in seen.get("objects", {}).items()}
        members = [name for name in PYTORCHS if name not in actual] if TOGETHER in actual else []
        planned = _largest(summary["moments"], phase["name"], members)
        names = list(dict.fromkeys([*planned, *actual]))
        found.append(
            PhaseComparison(
                name=phase["name"],
                planned_bytes=phase["peak_bytes"],
                measured_bytes=int(seen["peak_bytes"]),
                objects=tuple(
                    ObjectComparison(name=n, planned_bytes=planned.get(n), measured_bytes=actual.get(n)) for n in names
                ),
            )
        )
    return found


def _largest(moments: Sequence[Mapping[str, Any]], phase: str, together: Sequence[str]) -> dict[str, int]:
    """Each object at its largest in a phase; those named together as one, at the largest of their sums."""
    largest: dict[str, int] = {}
    for moment in moments:
        if moment["phase"] != phase:
            continue
        sizes: dict[str, int] = {}
        for item in moment["objects"]:
            name = TOGETHER if item["name"] in together else item["name"]
            sizes[name] = sizes.get(name, 0) + item["bytes"]
        largest |= {name: max(size, largest.get(name, 0)) for name, size in sizes.items()}
    return largest


def comparison_json(rows: Sequence[PhaseComparison]) -> list[dict[str, Any]]:
    """Rows as dictionaries."""
    return [asdict(row) | {"ratio": row.ratio, "within_tolerance": row.within_tolerance} for row in rows]


def comparison_table(rows: Sequence[PhaseComparison]) -> Table:
    """Phases with their objects. An object's own peak may lie beside the phase's, so objects need not add up."""
    from rich.text import Text

    table = new_table("Plan against measurement")
    table.add_column("phase")
    table.add_column("object")
    for heading in ("planned", "measured", "measured / planned"):
        table.add_column(heading, justify="right")
    for row in rows:
        style = "bold" if row.within_tolerance else "bold red"
        table.add_row(
            Text(row.name, style=style), "", format_bytes(row.planned_bytes), format_bytes(row.measured_bytes),
            Text(f"{row.ratio:.3f}", style=style),
        )  # fmt: skip
        for item in row.objects:
            sides = (item.planned_bytes, item.measured_bytes)
            share = f"{sides[1] / sides[0]:.3f}" if sides[0] and sides[1] is not None else ""
            table.add_row("", item.name, *("-" if size is None else format_bytes(size) for size in sides), share)
        table.add_section()
    return table
