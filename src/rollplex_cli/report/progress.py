"""Progress bars of the live display."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rollplex_cli.core.units import format_seconds
from rollplex_cli.report.series import Row, number, printable, trailing_means

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from rollplex_cli.core.status import PrepareStatus, RankStatus

STAGES = {
    "starting": "starting the preparation",
    "render": "rendering clips",
    "base": "building the model",
    "cold_start": "supervised cold start",
    "done": "prepared",
    "failed": "preparation failed",
}
ETA_STEPS = 10
"""Steps whose mean time gives the time left."""


def stage_title(stage: str) -> str:
    """What a stage of the preparation is called."""
    return STAGES.get(stage, stage)


def prepare_note(status: PrepareStatus) -> str:
    """Loss and accuracy of the cold start, or what the preparation says itself."""
    parts = []
    if status.loss is not None:
        parts.append(f"loss {status.loss:.3f}")
    if status.accuracy is not None:
        parts.append(f"sampled accuracy {status.accuracy:.2f}")
    if status.message:
        parts.append(status.message)
    return ", ".join(parts)


class ProgressLine:
    """One line for each stage of the preparation, then one for the steps."""

    def __init__(self, total_steps: int | None, *, unicode: bool) -> None:
        self._total_steps = total_steps
        self._bars = Progress(
            SpinnerColumn("dots" if unicode else "line", finished_text=" "),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[count]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            auto_refresh=False,
        )
        self._current = ""

    def preparation(self, status: PrepareStatus | None) -> RenderableType:
        """Bars of the stages so far, the last one running."""
        stage = status.stage if status is not None else "starting"
        if status is None or not status.total:
            self._show(stage_title(stage), None, 0, "", prepare_note(status) if status is not None else "")
        else:
            count = f"{status.step}/{status.total}"
            self._show(stage_title(stage), status.total, status.step, count, prepare_note(status))
        return self._bars.get_renderable()

    def training(self, steps: Sequence[Row], ranks: Sequence[RankStatus]) -> RenderableType:
        """The bar of the training steps, with the time left at most: a target may end the run earlier.

        The bars of the preparation are gone by then.
        """
        done = int(steps[-1]["step"]) if steps else 0
        if not steps:
            phase = next((status.phase for status in ranks if status.phase), "")
            count = f"{len(ranks)} {'rank' if len(ranks) == 1 else 'ranks'}"
            self._show("starting the engines", None, 0, count, phase)
            return self._bars.get_renderable()
        times = [value for value in (number(row, "step_s") for row in steps) if value is not None]
        note = ranks[0].phase if ranks else ""
        total = self._total_steps
        if total is None:
            self._show("steps", None, done, str(done), note)
            return self._bars.get_renderable()
        if times and done < total:
            left = (total - done) * trailing_means(times, ETA_STEPS)[-1]
            note += f" at most {format_seconds(left)} left"
        self._show("reinforcement learning", total, done, f"{done}/{total}", note.strip())
        return self._bars.get_renderable()

    def _show(self, title: str, total: int | None, completed: int, count: str, note: str) -> None:
        if title != self._current:
            for task in self._bars.tasks:
                # The last count seen may lie before the end of the stage.
                self._bars.update(task.id, total=1, completed=1, count="done", visible=title in STAGES.values())
            self._current = title
            self._bars.add_task(title, total=total, count=count, note="")
        self._bars.update(self._bars.tasks[-1].id, total=total, completed=completed, count=count, note=printable(note))
