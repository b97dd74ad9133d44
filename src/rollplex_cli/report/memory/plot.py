"""A picture of the memory plan: bytes over the moments of a step, stacked by object, with the budget as a line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.units import GIB, MIB
from rollplex_cli.report.plots import INK, SOFT, STYLE, VERMILION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

COLORS = {
    # Weights blue, the rollout's own green, boundaries and activations yellow to orange, what an update needs purple.
    "snapshot": "#0072B2",
    "second_weights": "#003f63",
    "reference_weights": "#56B4E9",
    "rollout_kv": "#009E73",
    "vision_cache": "#66c5ab",
    "rollout_workspace": "#b3e2d5",
    "reference_boundary": "#fdf3b4",
    "actor_boundary": "#F0E442",
    "vision_features": "#e0d98a",
    "boundary_gradients": "#c9bd20",
    "prefix_activations": "#f4c560",
    "suffix_activations": "#E69F00",
    "gradients": "#CC79A7",
    "optimizer_chunks": "#8e4470",
    "optimizer_state": "#5d2b49",
    "publish_staging": "#444444",
    "context_and_graphs": "#c4c4c4",
}
GAP = 0.18
"""Between phases, in widths of a moment."""
LABEL_ROOM = -0.14
"""Below the axis, in its heights, for the names of moments."""
PER_ROW = 3
"""Small panels beside the plan's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plan: the `moments` of a memory summary."""

    title: str
    moments: Sequence[Mapping[str, Any]]

    @property
    def peak_bytes(self) -> int:
        """Of the largest moment."""
        return max(int(moment["bytes"]) for moment in self.moments)


def draw_memory(plan: Panel, others: Sequence[Panel], budget_bytes: int | None, path: Path) -> None:
    """Write the picture: the plan, and beside it what it would be without some measures, these at one scale."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels = [plan, *others]
    unit, name = (GIB, "GiB") if plan.peak_bytes >= 4 * GIB else (MIB, "MiB")
    columns = min(PER_ROW, len(others))
    rows = -(-len(others) // PER_ROW) if others else 0
    with mpl.rc_context(STYLE):
        width = 8 + 3 * columns
        figure = Figure(figsize=(width, 6.4), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        halves: Any = figure.subfigures(1, 2, width_ratios=[7.2, 3 * columns]) if others else [figure]
        axes = halves[0].subplots()
        _draw(axes, plan, budget_bytes, unit, large=True)
        axes.set_ylabel(f"{name} of one rank")
        axes.set_ylim(0, _top([plan], budget_bytes) / unit)
        if others:
            grid = halves[1].subplots(rows, columns, squeeze=False)
            for index, cell in enumerate(grid.flat):
                if index >= len(others):
                    cell.set_visible(False)
                    continue
                _draw(cell, others[index], budget_bytes, unit, large=False)
                cell.set_ylim(0, _top(others, budget_bytes) / unit)
        present = {item["name"] for panel in panels for moment in panel.moments for item in moment["objects"]}
        handles = [Patch(color=COLORS[key], label=key.replace("_", " ")) for key in COLORS if key in present]
        figure.legend(handles=handles, loc="outside lower center", ncols=width // 2, frameon=False)
        figure.savefig(path)


def _top(panels: Sequence[Panel], budget_bytes: int | None) -> float:
    """Upper end of the axis, in bytes. A budget far above everything would flatten the rest: it is left outside."""
    peak = max(panel.peak_bytes for panel in panels)
    return 1.13 * max(peak, budget_bytes if budget_bytes is not None and budget_bytes < 3 * peak else 0)


def _draw(axes: Any, panel: Panel, budget_bytes: int | None, unit: int, *, large: bool) -> None:
    starts, spans = _places(panel.moments)
    for start, moment in zip(starts, panel.moments, strict=True):
        base = 0.0
        sizes = {item["name"]: item["bytes"] / unit for item in moment["objects"]}
        # What stays longest lies lowest, so that steps are seen where they happen.
        for key in COLORS:
            if key in sizes:
                axes.bar(start, sizes[key], width=1.0, bottom=base, align="edge", color=COLORS[key], linewidth=0)
                base += sizes[key]
        over = budget_bytes is not None and moment["bytes"] > budget_bytes
        style = {"color": VERMILION, "fontweight": "bold"} if over else {"color": INK}
        if large or moment is max(panel.moments, key=lambda m: int(m["bytes"])):
            axes.annotate(
                f"{base:.1f}" if base < 100 else f"{base:.0f}", (start + 0.5, base), (0, 3),
                textcoords="offset points", ha="center", fontsize=9.5 if large else 8.5,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.9}, zorder=5, **style,
            )  # fmt: skip
    if budget_bytes is not None:
        axes.axhline(budget_bytes / unit, color=INK, linewidth=1.3, linestyle=(0, (4, 3)))
        if large:
            axes.annotate(
                f"budget {budget_bytes / unit:.1f}", (spans[-1][2], budget_bytes / unit), (0, 4),
                textcoords="offset points", ha="right", color=INK,
            )  # fmt: skip
    axes.set_title(panel.title, fontsize=12 if large else 10)
    axes.grid(visible=False, axis="x")
    axes.set_xlim(-GAP, spans[-1][2] + GAP)
    if large:
        names = ["\n".join(moment["name"].replace(", ", " +\u00a0").split(" ")) for moment in panel.moments]
        axes.set_xticks([start + 0.5 for start in starts], names, fontsize=8.5)
        _name_phases(axes, spans)
    else:
        # Narrow ones side by side would run into each other.
        names = [("\n" if index % 2 else "") + name for index, (name, _, _) in enumerate(spans)]
        axes.set_xticks([(low + high) / 2 for _, low, high in spans], names, fontsize=7)
    axes.tick_params(axis="x", length=0)


def _places(moments: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[tuple[str, float, float]]]:
    """Left edge of every moment; name, left and right edge of every phase."""
    starts: list[float] = []
    spans: list[tuple[str, float, float]] = []
    cursor = 0.0
    for moment in moments:
        if spans and spans[-1][0] == moment["phase"]:
            spans[-1] = (moment["phase"], spans[-1][1], cursor + 1)
        else:
            cursor += GAP if spans else 0.0
            spans.append((moment["phase"], cursor, cursor + 1))
        starts.append(cursor)
        cursor += 1.0
    return starts, spans


def _name_phases(axes: Any, spans: Sequence[tuple[str, float, float]]) -> None:
    """Names of the phases under the names of their moments, over a line as wide as the phase."""
    transform = axes.get_xaxis_transform()
    for name, low, high in spans:
        axes.plot([low, high], [LABEL_ROOM, LABEL_ROOM], color=SOFT, linewidth=1.2, transform=transform, clip_on=False)
        style = {"ha": "center", "va": "top", "fontsize": 9, "color": INK, "fontweight": "bold"}
        axes.text((low + high) / 2, LABEL_ROOM - 0.01, name, transform=transform, **style)
