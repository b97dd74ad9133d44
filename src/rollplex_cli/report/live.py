"""What a user sees while a run goes: preparation, the latest steps, progress, and a summary at the end.

Everything goes to stderr. On a terminal it is a display that updates in place; elsewhere, and with `plain`, it is one
line per step.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rollplex_cli.core.units import format_seconds
from rollplex_cli.report.progress import ProgressLine, prepare_note, stage_title
from rollplex_cli.report.series import (
    WINDOW,
    Row,
    format_share,
    has_kl,
    number,
    printable,
    reward_means,
    show,
    sparkline,
    steps_of,
)
from rollplex_cli.report.summary import print_summary
from rollplex_cli.report.watch import RunWatch

if TYPE_CHECKING:
    from types import TracebackType

    from rollplex_cli.core.paths import RunFolder
    from rollplex_cli.profile.schema import TargetProfile

SHOWN_STEPS = 12
QUIET_S = 20.0
"""Without a new step for this long, what the ranks wait for is shown."""
PLAIN_COLD_START_EVERY = 20
"""Steps between lines about the cold start where there is no live display."""

COLUMNS = (
    # heading, key of the row, format
    ("zero\nvar", "zero_variance_share", ".2f"),
    ("KL", "kl", ".3f"),
    ("-log\np", "entropy", ".3f"),
    ("grad\nnorm", "grad_norm", ".2f"),
    ("parity", "logprob_diff_mean", ".0e"),
    ("tokens", "response_tokens_mean", ".1f"),
    ("step\ns", "step_s", ".2f"),
)


class LiveView:
    """Shows a run while it goes. Use as a context manager and call `poll` a few times a second.

    Args:
        run: the run folder; other processes write it.
        title: one line above the display.
        total_steps: steps after which the run ends at the latest.
        target: the profile's target, if it has one.
        plain: never update in place; one line per step.
        console: where to write; stderr if None.
    """

    def __init__(
        self,
        run: RunFolder,
        title: str,
        total_steps: int,
        target: TargetProfile | None = None,
        *,
        plain: bool = False,
        console: Console | None = None,
    ) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._watch = RunWatch(run)
        self._title = title
        # A benchmark measures time: its rewards mean nothing, and its number of steps is not the profile's.
        is_bench = run.bench.exists()
        self._total_steps = None if is_bench else total_steps
        self._target = target.reward_mean if target is not None and not is_bench else None
        self._window = target.window if target is not None else WINDOW
        self._started = self._last_step = time.monotonic()
        self._said = ""
        self._cold_start_said = False
        self._steps_said = 0
        self._evaluations_said: set[int] = set()
        in_place = not plain and self._console.is_terminal and not self._console.is_dumb_terminal
        self._progress = ProgressLine(self._total_steps, unicode=self._unicode)
        self._live: Live | None = None
        if in_place:
            # `poll` draws: a refreshing thread would read rows while they are replaced.
            self._live = Live(console=self._console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveView:
        self._say(self._title)
        # Steps of an earlier start of this run are shown in the table but not announced again.
        news = self._watch.poll()
        self._evaluations_said = {row["step"] for row in news.evaluations}
        self._steps_said = self._newest_step
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Where the terminal is gone, the run's own end still counts.
        with contextlib.suppress(OSError):
            self._finish()

    def _finish(self) -> None:
        try:
            self.poll()
        finally:
            if self._live is not None:
                self._live.stop()
        if self._live is not None:
            self._console.print(Group(*self._step_parts()))
        elapsed = time.monotonic() - self._started
        print_summary(
            self._watch,
            self._target,
            self._window,
            self._total_steps,
            self._console,
            elapsed_s=elapsed,
        )

    def poll(self) -> None:
        """Read what is new and show it."""
        news = self._watch.poll()
        if news.steps:
            self._last_step = time.monotonic()
        if news.restarted:
            self._steps_said = self._newest_step
        self._say_cold_start()
        for row in news.evaluations:
            if row["step"] not in self._evaluations_said:
                self._say_evaluation(row)
        if self._live is not None:
            self._live.update(self._render(), refresh=True)
            return
        if self._watch.preparing:
            self._say_preparation()
        for row in news.steps:
            if row["step"] > self._steps_said:
                self._steps_said = row["step"]
                self._say(self._step_line(row))

    @property
    def _unicode(self) -> bool:
        return self._console.encoding.lower().startswith("utf")

    @property
    def _newest_step(self) -> int:
        steps = steps_of(self._watch.rows)
        return int(steps[-1]["step"]) if steps else -1

    def _say(self, line: str) -> None:
        self._console.print(Text(printable(line)), soft_wrap=True)

    def _say_preparation(self) -> None:
        status = self._watch.prepare
        if status is None:
            return
        part = status.step // PLAIN_COLD_START_EVERY if status.stage == "cold_start" else 0
        mark = f"{status.stage} {part}"
        if mark != self._said:
            self._said = mark
            count = f" {status.step}/{status.total}" if status.total else ""
            note = prepare_note(status)
            self._say(f"{stage_title(status.stage)}{count}{': ' + note if note else ''}")

    def _say_evaluation(self, row: Row) -> None:
        self._evaluations_said.add(row["step"])
        accuracy, samples = number(row, "eval.heldout_accuracy"), number(row, "eval.num_samples")
        if accuracy is not None:
            self._say(f"held-out accuracy after step {row['step']}: {accuracy:.3f} ({show(samples, '.0f')} samples)")

    def _say_cold_start(self) -> None:
        """Once, when it is over: the reader must know where the reward of the first step comes from."""
        status = self._watch.cold_start
        if self._cold_start_said or self._watch.preparing or status is None or status.accuracy is None:
            return
        self._cold_start_said = True
        self._say(f"supervised cold start done: sampled accuracy {status.accuracy:.2f}; from here on RL only")

    def _mean_at(self, row: Row) -> float | None:
        steps = steps_of(self._watch.rows)
        means = reward_means(steps, self._window)
        return next((mean for mean, other in zip(means, steps, strict=True) if other["step"] == row["step"]), None)

    def _step_line(self, row: Row) -> str:
        parts = [
            f"step {row['step']}" if self._total_steps is None else f"step {row['step']}/{self._total_steps}",
            f"reward {show(number(row, 'reward_mean'))} +- {show(number(row, 'reward_std'))}",
            f"{self._window}-step mean {show(self._mean_at(row))}",
            f"format {show(format_share(row), '.2f')}",
        ]
        parts += [
            f"{heading.replace(chr(10), ' ')} {show(number(row, key), spec)}"
            for heading, key, spec in COLUMNS
            if number(row, key) is not None and (key != "kl" or has_kl(self._watch.rows))
        ]
        if left_out := number(row, "skipped_samples"):
            parts.append(f"left out {left_out:.0f}")
        return "  ".join(parts)

    def _step_table(self) -> Table:
        # Narrow enough for a terminal of 80 columns.
        table = Table(header_style="bold", box=None, padding=(0, 0, 0, 1), pad_edge=False)
        steps = steps_of(self._watch.rows)
        # A column nobody fills (KL without a reference) is left out.
        columns = [
            (name, key, spec)
            for name, key, spec in COLUMNS
            if (has_kl(steps) if key == "kl" else any(number(row, key) is not None for row in steps))
        ]
        headings = ["step", "reward", f"{self._window}-step\nmean", "format\nshare", *(name for name, _, _ in columns)]
        for heading in headings:
            table.add_column(Text(heading), justify="right", no_wrap=True)
        means = reward_means(steps, self._window)
        for row, mean in list(zip(steps, means, strict=True))[-SHOWN_STEPS:]:
            reached = self._target is not None and mean >= self._target
            table.add_row(
                str(row["step"]),
                f"{show(number(row, 'reward_mean'))} +- {show(number(row, 'reward_std'), '.2f')}",
                Text(f"{mean:.3f}", style="bold green" if reached else "bold"),
                show(format_share(row), ".2f"),
                *(show(number(row, key), spec) for _, key, spec in columns),
            )
        return table

    def _step_parts(self) -> list[RenderableType]:
        steps = steps_of(self._watch.rows)
        if not steps:
            return []
        means = reward_means(steps, self._window)
        goal = f", target {self._target:g}" if self._target is not None else ""
        spark = sparkline(means, max(10, self._console.width - 48), unicode=self._unicode)
        trend = f"{self._window}-step mean {means[0]:.2f} {spark} {means[-1]:.2f}{goal}"
        return [self._step_table(), Text(trend, no_wrap=True)]

    def _render(self) -> RenderableType:
        if self._watch.preparing:
            return self._progress.preparation(self._watch.prepare)
        parts = self._step_parts()
        parts.append(self._progress.training(steps_of(self._watch.rows), self._watch.ranks))
        quiet_s = time.monotonic() - self._last_step
        if quiet_s > QUIET_S:
            lines = [f"no step for {format_seconds(quiet_s)}", *self._watch.waiting]
            parts += [Text(printable(line), style="yellow") for line in lines]
        return Group(*parts)
