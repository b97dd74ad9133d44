"""What the ranks of a run held in memory, from its events."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex_cli.core.events import read_events

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder

PYTORCH = "pytorch"


def memory_rows(run: RunFolder) -> list[dict[str, Any]]:
    """The `memory` events of all ranks, one per rank, step and phase, in the order written."""
    rows: list[dict[str, Any]] = []
    for path in sorted(run.events_dir.glob("rank*.jsonl")):
        rows += [row for row in read_events(path) if row["name"] == "memory"]
    return rows


def measured_phases(run: RunFolder, step: int | None = None) -> dict[str, dict[str, Any]]:
    """By phase: `peak_bytes`, `driver_peak_bytes` and `objects` (bytes by name, each at its largest) of the rank that
    held most of each.

    Objects are those in regions, `context_and_graphs`, boundaries, and `activations_and_caches`: the rest of what
    PyTorch gave out. On a CPU, where PyTorch's memory is the process's, only regions and boundaries are known.

    Args:
        step: which one; None takes the last that was measured whole.
    """
    rows = memory_rows(run)
    wanted = step if step is not None else max((row["step"] for row in rows if row["phase"] == "PUBLISH"), default=0)
    phases: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["step"] != wanted:
            continue
        phase = phases.setdefault(row["phase"], {"peak_bytes": 0, "driver_peak_bytes": 0, "objects": {}})
        for name in ("peak_bytes", "driver_peak_bytes"):
            phase[name] = max(phase[name], int(row[name]))
        for name, size in _objects(row).items():
            phase["objects"][name] = max(phase["objects"].get(name, 0), size)
    return phases


def _objects(row: dict[str, Any]) -> dict[str, int]:
    objects = {name: int(size) for name, size in row["objects"].items()}
    boundaries = {name: int(size) for name, size in row.get("boundaries", {}).items()}
    if PYTORCH in objects:
        objects["activations_and_caches"] = max(0, objects.pop(PYTORCH) - sum(boundaries.values()))
    return objects | boundaries
