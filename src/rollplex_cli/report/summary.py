"""The last words of a run: what was reached, what it is worth on unseen data, and where to look next."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from rollplex_cli.core.units import format_seconds
from rollplex_cli.report.series import heldout_points, number, printable, reward_means, steps_of, target_reached

if TYPE_CHECKING:
    from rich.console import Console

    from rollplex_cli.report.watch import RunWatch


def print_summary(
    watch: RunWatch,
    target: float | None,
    window: int,
    total_steps: int | None,
    console: Console,
    *,
    elapsed_s: float,
) -> None:
    """Draw the pictures and print the summary of a run that ended.

    Args:
        watch: the run as last seen.
        target: mean reward the profile asks for.
        window: steps of that mean.
        total_steps: steps the run was to take at most; None for a benchmark, whose rewards mean nothing.
        console: where to print.
        elapsed_s: seconds since the run was started (or resumed).
    """
    root = watch.folder.root
    lines = [f"Run folder: {root}"]
    if steps_of(watch.rows) and total_steps is None:
        lines = _picture_lines(watch)
    elif steps_of(watch.rows) and total_steps is not None:
        lines = [*_result_lines(watch, target, window, elapsed_s), *_picture_lines(watch)]
        lines += _next_lines(str(root), finished=_finished(watch, target, window, total_steps))
    for line in lines:
        style = "bold green" if line.startswith("Target reached") else ""
        console.print(Text(printable(line), style=style), soft_wrap=True)


def _finished(watch: RunWatch, target: float | None, window: int, total_steps: int) -> bool:
    return bool(target_reached(watch.rows, target, window)) or len(steps_of(watch.rows)) >= total_steps


def _result_lines(watch: RunWatch, target: float | None, window: int, elapsed_s: float) -> list[str]:
    steps = steps_of(watch.rows)
    means = reward_means(steps, window)
    reached = target_reached(watch.rows, target, window)
    took = f"after {len(steps)} steps, {format_seconds(elapsed_s)} in all"
    mean = f"{min(window, len(steps))}-step mean reward {means[0]:.3f} -> {means[-1]:.3f}"
    if target is None:
        lines = [f"{mean[0].upper()}{mean[1:]} {took}"]
    else:
        lines = [f"Target {'reached' if reached else 'not reached'}: {mean} (target {target:g}) {took}"]
    if watch.cold_start is not None and watch.cold_start.accuracy is not None:
        lines.append(f"RL began after a supervised cold start (sampled accuracy {watch.cold_start.accuracy:.2f})")
    points = heldout_points(watch.rows)
    if points:
        samples = next((number(row, "eval.num_samples") for row in watch.rows if "eval" in row), None)
        of = f" on {samples:.0f} samples" if samples is not None else ""
        change = " -> ".join(f"{accuracy:.3f}" for _, accuracy in (points[0], points[-1])[: len(points)])
        lines.append(f"Held-out accuracy: {change} (greedy{of} that no decision has seen)")
    return lines


def _picture_lines(watch: RunWatch) -> list[str]:
    # Drawing loads matplotlib: only a run that ended and wants pictures pays for it.
    from rollplex_cli.report.run import write_pictures
    from rollplex_cli.report.series import load_run

    try:
        data = load_run(watch.folder.root)
        if data.profile is not None and not data.profile.logging.pictures:
            return []
        pictures = write_pictures(data)
    except Exception as error:  # A picture that cannot be drawn must not turn a good run into a failed one.
        return [f"Pictures could not be drawn: {type(error).__name__}: {error}"]
    return [f"{'Pictures:' if path == pictures[0] else ' ' * 9} {path}" for path in pictures]


def _next_lines(root: str, *, finished: bool) -> list[str]:
    program, folder = program_name(), shlex.quote(root)
    lines = [f"Next:     {program} report {folder}"]
    if finished:
        lines.append(f"          {program} export {folder} --to {shlex.quote(root.rstrip('/') + '-model')}")
    else:
        lines.append(f"          {program} train --resume --run-dir {folder}")
    return lines


def program_name() -> str:
    """How this program can be called again: `rollplex` where that is on PATH, else as it was called."""
    called = Path(sys.argv[0])
    if called.name != "rollplex":
        return "rollplex"
    found = shutil.which("rollplex")
    if found is not None and Path(found).resolve() == called.resolve():
        return "rollplex"
    return shlex.quote(os.path.relpath(called))
