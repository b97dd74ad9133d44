"""One step as a picture: what each part of a rank did when, one row and one colour each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex_cli.report.plots import BLUE, GREEN, INK, PURPLE, SKY, SOFT, STYLE, VERMILION
from rollplex_cli.report.spans import (
    PHASE,
    ROW_OF_TASK,
    ROWS,
    Span,
    busy_s,
    intervals_of,
    pack,
    tasks_only,
    typical_steps,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

COLOR_OF_ROW = {
    "decode": BLUE,
    "reference": GREEN,
    "actor": VERMILION,
    "host": SOFT,
    "update": PURPLE,
    "publish": SKY,
}
LABEL_OF_ROW = {"host": "host, reward", "update": "optimizer, update"}

PREFIX_ALPHA = 0.45
"""Prefix tasks are drawn lighter than suffix tasks of the same row."""
BAR_HEIGHT = 0.72
THIN = 0.002
"""Share of a step below which a bar is about as thin as its outline."""
SCHEDULE_ORDER = ("colocate", "rollplex")


def draw_timeline(spans: Sequence[Span], path: Path, title: str) -> bool:
    """Write the typical step of every schedule, `colocate` above `rollplex`; False, and nothing written, without tasks.

    All panels share one time axis, so a shorter step looks shorter.
    """
    steps = {name: found for name, found in typical_steps(spans).items() if tasks_only(found)}
    if not steps:
        return False
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    order = sorted(steps, key=lambda name: (SCHEDULE_ORDER.index(name) if name in SCHEDULE_ORDER else 9, name))
    with mpl.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure = Figure(figsize=(11, 0.7 + 2.9 * len(order)), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        panels = figure.subplots(len(order), 1, squeeze=False, sharex=True)[:, 0]
        ends = [_draw_step(axes, steps[name], name) for axes, name in zip(panels, order, strict=True)]
        panels[0].set_xlim(0.0, max(ends) * 1.01)
        panels[-1].set_xlabel("seconds since the start of the step; light: prompt prefixes, full: everything else")
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        figure.savefig(path)
    return True


def _draw_step(axes: Any, spans: Sequence[Span], schedule: str) -> float:
    """Draw one panel; returns the length of the step in seconds."""
    tasks = tasks_only(spans)
    origin = min(span.start_s for span in tasks)
    end = max(span.end_s for span in tasks) - origin
    _draw_phases(axes, [span for span in spans if span.name == PHASE], origin, end)
    for place, row in enumerate(ROWS):
        members = [span for span in tasks if ROW_OF_TASK[span.name] == row]
        _draw_row(axes, members, (origin, end), place, COLOR_OF_ROW[row])
        busy = busy_s(intervals_of(members))
        label = _seconds(busy) if members else "none"
        axes.annotate(label, (1.008, place), xycoords=("axes fraction", "data"), va="center", color="#555555")
    axes.set_yticks(range(len(ROWS)), [LABEL_OF_ROW.get(row, row) for row in ROWS])
    axes.set_ylim(len(ROWS) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.tick_params(axis="x", labelbottom=True)
    first = tasks[0]
    axes.set_title(f"{schedule or 'step'}: {_seconds(end)} (step {first.step}, rank {first.rank})", pad=18)
    return end


def _draw_phases(axes: Any, phases: Sequence[Span], origin: float, end: float) -> None:
    """Thin lines where a phase begins, its name above; names too close to each other to be read are left out."""
    last_label = -1.0
    for span in phases:
        start = max(0.0, span.start_s - origin)
        if start >= end:
            continue
        axes.axvline(start, color="#c4c4c4", linewidth=0.9, zorder=0.5)
        if last_label < 0 or start - last_label > 0.075 * end:
            axes.annotate(span.phase, (start, 1.02), xycoords=("data", "axes fraction"), fontsize=7.5, color="#666666")
            last_label = start


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.1f} ms"


def _draw_row(axes: Any, members: Sequence[Span], extent: tuple[float, float], place: int, color: str) -> None:
    """Bars of one row; those that overlap share its height. `extent`: start of the step and its length, seconds."""
    if not members:
        return
    origin, length = extent
    tracks = pack(intervals_of(members))
    height = BAR_HEIGHT / (max(tracks) + 1)
    for span, track in zip(members, tracks, strict=True):
        thin = span.end_s - span.start_s < THIN * length
        axes.broken_barh(
            [(span.start_s - origin, span.end_s - span.start_s)],
            (place - BAR_HEIGHT / 2 + track * height, height),
            facecolor=color,
            alpha=PREFIX_ALPHA if span.name in ("encode", "ref_prefix", "actor_prefix") else 1.0,
            # A white outline parts neighbours; a bar hardly wider than it would vanish, and is drawn as a line.
            edgecolor=color if thin else "white" if height > 0.1 else "none",
            linewidth=0.6 if thin else 0.3,
        )
