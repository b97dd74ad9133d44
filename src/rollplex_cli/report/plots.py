"""The curves of a run as a picture: reward above, what can go wrong below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex_cli.report.series import (
    format_share,
    has_kl,
    heldout_points,
    number,
    reward_means,
    steps_of,
)
from rollplex_cli.report.tables import PHASES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from rollplex_cli.report.series import Row, RunData

# Colours that stay apart for colour-blind readers (M. Okabe, K. Ito, "Color Universal Design", 2008).
BLUE, SKY, GREEN, ORANGE, VERMILION, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#E69F00", "#D55E00", "#CC79A7"
INK, SOFT = "#222222", "#8a8a8a"

STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "axes.edgecolor": "#bbbbbb",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#ececec",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "legend.frameon": True,
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,
    "legend.fontsize": 8.5,
}


def draw_curves(data: RunData, path: Path) -> bool:
    """Write the picture of all curves; False, and nothing written, for a run without a step."""
    rows = steps_of(data.rows)
    if not rows:
        return False
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = _small_panels(rows)
    with mpl.rc_context(STYLE):
        height = 3.6 + 2.3 * ((len(panels) + 2) // 3)
        figure = Figure(figsize=(11, height), dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        halves: Any = figure.subfigures(2, 1, height_ratios=[3.6, height - 3.6])
        top, below = halves
        _draw_reward(top.subplots(), data, rows)
        grid = list(below.subplots((len(panels) + 2) // 3, 3, squeeze=False).flat)
        for axes, panel in zip(grid, panels, strict=False):
            panel(axes, rows)
            _step_axis(axes, rows)
        for axes in grid[len(panels) :]:
            axes.set_visible(False)
        figure.savefig(path)
    return True


def _small_panels(rows: Sequence[Row]) -> list[Callable[[Any, Sequence[Row]], None]]:
    panels: list[Callable[[Any, Sequence[Row]], None]] = []
    if has_kl(rows):
        panels.append(_draw_kl)
    return [*panels, _draw_lengths, _draw_shares, _draw_gradient, _draw_parity, _draw_time]


def _step_axis(axes: Any, rows: Sequence[Row]) -> None:
    from matplotlib.ticker import MaxNLocator

    _step_limits(axes, [row["step"] for row in rows])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _step_limits(axes: Any, steps: Sequence[int]) -> None:
    margin = max(0.5, 0.02 * (max(steps) - min(steps)))
    axes.set_xlim(min(steps) - margin, max(steps) + margin)


def _from_zero(axes: Any) -> None:
    """Let the vertical axis begin at zero with room above the highest value."""
    top = axes.dataLim.y1
    axes.set_ylim(0, 1.12 * top if top > 0 else 1.0)


def _draw_reward(axes: Any, data: RunData, rows: Sequence[Row]) -> None:
    steps = [row["step"] for row in rows]
    rewards = [number(row, "reward_mean") or 0.0 for row in rows]
    means = reward_means(rows, data.window)
    axes.plot(steps, rewards, "o", color=SKY, markersize=3.5, alpha=0.8, label="mean of a step")
    axes.plot(steps, means, color=BLUE, linewidth=2.4, label=f"mean of {data.window} steps")
    points = heldout_points(data.rows)
    if points:
        axes.plot(
            [step for step, _ in points],
            [accuracy for _, accuracy in points],
            "D",
            color=ORANGE,
            markeredgecolor=INK,
            markersize=7,
            clip_on=False,
            zorder=5,
            label="held-out accuracy",
        )
        for step, accuracy in (points[0], points[-1]):
            axes.annotate(f"{accuracy:.2f}", (step, accuracy), (0, 9), textcoords="offset points", ha="center")
    if data.target is not None:
        label = f"target {data.target:g}"
        axes.axhline(data.target, color=VERMILION, linewidth=1.2, linestyle=(0, (4, 3)), label=label)
    axes.annotate(
        f"{means[-1]:.2f}",
        (steps[-1], means[-1]),
        (0, -14),
        textcoords="offset points",
        ha="center",
        color=BLUE,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
    )
    axes.set_title(f"Reward: {data.name}", fontsize=12)
    axes.set_xlabel("step")
    _step_axis(axes, rows)
    _step_limits(axes, [*steps, *(step for step, _ in points)])
    if min(rewards) >= 0 and max(rewards) <= 1:
        axes.set_ylim(0, 1.06)
    axes.legend(loc="lower right", ncols=2)


def _line(axes: Any, rows: Sequence[Row], key: str, color: str, label: str | None = None, **style: Any) -> None:
    found = [(row["step"], number(row, key)) for row in rows]
    shown = [(step, value) for step, value in found if value is not None]
    style.setdefault("linewidth", 1.6)
    # A single point draws no line.
    marker = "o" if len(shown) == 1 else ""
    steps, values = [step for step, _ in shown], [value for _, value in shown]
    axes.plot(steps, values, marker=marker, color=color, label=label, **style)


def _draw_kl(axes: Any, rows: Sequence[Row]) -> None:
    _line(axes, rows, "kl", PURPLE)
    axes.set_title("KL to the reference")
    # The estimators k1 and k2 of a sample may be below zero.
    if all((number(row, "kl") or 0.0) >= 0 for row in rows):
        _from_zero(axes)


def _draw_lengths(axes: Any, rows: Sequence[Row]) -> None:
    _line(axes, rows, "response_tokens_mean", GREEN)
    axes.set_title("Response tokens")
    _from_zero(axes)


def _draw_shares(axes: Any, rows: Sequence[Row]) -> None:
    shares = [{**row, "format": format_share(row)} for row in rows]
    _line(axes, shares, "format", GREEN, "asked format")
    _line(axes, rows, "zero_variance_share", VERMILION, "zero-variance groups")
    _line(axes, rows, "entropy", SOFT, "-log p of sampled tokens", linewidth=1.2)
    axes.set_title("Shares and entropy")
    _from_zero(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="best")


def _draw_gradient(axes: Any, rows: Sequence[Row]) -> None:
    _line(axes, rows, "grad_norm", ORANGE)
    axes.set_title("Gradient norm, before clipping")
    _from_zero(axes)


def _draw_parity(axes: Any, rows: Sequence[Row]) -> None:
    _line(axes, rows, "logprob_diff_max", SKY, "largest", linewidth=1.1)
    _line(axes, rows, "logprob_diff_mean", BLUE, "mean")
    axes.set_title("Rollout against trainer, |log p|")
    values = [number(row, key) for row in rows for key in ("logprob_diff_mean", "logprob_diff_max")]
    if any(value is not None and value > 0 for value in values):
        axes.set_yscale("log")
        axes.legend(loc="best")


def _draw_time(axes: Any, rows: Sequence[Row]) -> None:
    steps = [row["step"] for row in rows]
    layers = [[number(row, f"phase_s.{phase}") or 0.0 for row in rows] for phase in PHASES]
    if len(rows) > 1 and any(any(layer) for layer in layers):
        axes.stackplot(steps, layers, colors=(BLUE, ORANGE, PURPLE, SKY), labels=PHASES, alpha=0.85, linewidth=0)
    _line(axes, rows, "step_s", INK, "whole step", linewidth=1.0)
    axes.set_title("Seconds a step")
    _from_zero(axes)
    axes.legend(loc="lower right", ncols=2, fontsize=7.5)
