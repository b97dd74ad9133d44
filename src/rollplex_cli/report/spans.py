"""Arithmetic on the spans of a step: busy time, overlap, and which step stands for a run."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex_cli.report.series import number

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rollplex_cli.report.series import RunData

Interval = tuple[float, float]
"""(start, end) in seconds."""

PHASE = "phase"
"""Name of the events that are phases, not tasks."""

ROW_OF_TASK = {
    "decode": "decode",
    "exchange": "host",
    "reward": "host",
    "advantage": "host",
    "encode": "actor",
    "ref_prefix": "reference",
    "ref_suffix": "reference",
    "actor_prefix": "actor",
    "actor_suffix": "actor",
    "actor_prefix_backward": "actor",
    "update": "update",
    "publish": "publish",
}
"""Which row of the timeline a task is drawn in."""

ROUNDING_S = 2e-6
"""Error of the difference of two times in an events file."""

ROWS = ("decode", "reference", "actor", "host", "update", "publish")
"""Rows of the timeline, top to bottom."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One task or phase of one rank."""

    name: str
    start_s: float
    """Seconds since the epoch."""
    end_s: float
    step: int
    rank: int
    lane: str
    phase: str
    group: int | None
    schedule: str
    """Of the step, as its row of metrics names it (a benchmark changes it from step to step), else the profile's."""


def parse_spans(data: RunData) -> list[Span]:
    """The events of a run that are whole spans, by start."""
    spans = []
    schedules = {row["step"]: row.get("schedule") for row in data.rows}
    for row in data.events:
        start, end, step = number(row, "t0"), number(row, "t1"), row.get("step")
        if start is None or end is None or end < start or not isinstance(step, int):
            continue
        group = row.get("group")
        spans.append(
            Span(
                name=str(row.get("name", "")),
                start_s=start,
                end_s=end,
                step=step,
                rank=int(number(row, "rank") or 0),
                lane=str(row.get("lane", "")),
                phase=str(row.get("phase", "")),
                group=group if isinstance(group, int) and group >= 0 else None,
                schedule=str(schedules.get(step) or data.schedule),
            )
        )
    return spans


def tasks_only(spans: Iterable[Span]) -> list[Span]:
    """Spans of tasks, without phases and other marks."""
    return [span for span in spans if span.name in ROW_OF_TASK]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint intervals, ascending."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def busy_s(intervals: Iterable[Interval]) -> float:
    """Seconds covered by at least one interval."""
    return sum(end - start for start, end in union(intervals))


def common_s(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Seconds covered by both."""
    left, right = union(first), union(second)
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        start, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        total += max(0.0, end - start)
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total


def pack(intervals: Sequence[Interval]) -> list[int]:
    """A track for each interval, in the order given, so that no two on a track overlap; as few as needed.

    Times are rounded to microseconds when written, so neighbours may seem to overlap by that much.
    """
    ends: list[float] = []
    tracks = [0] * len(intervals)
    for index in sorted(range(len(intervals)), key=lambda place: intervals[place]):
        start, end = intervals[index]
        free = next((track for track, busy_until in enumerate(ends) if busy_until <= start + ROUNDING_S), len(ends))
        if free == len(ends):
            ends.append(end)
        else:
            ends[free] = end
        tracks[index] = free
    return tracks


def intervals_of(spans: Iterable[Span]) -> list[Interval]:
    """(start, end) of each span."""
    return [(span.start_s, span.end_s) for span in spans]


def by_step(spans: Iterable[Span]) -> dict[tuple[str, int, int], list[Span]]:
    """Spans by (schedule, rank, step)."""
    steps: dict[tuple[str, int, int], list[Span]] = {}
    for span in spans:
        steps.setdefault((span.schedule, span.rank, span.step), []).append(span)
    return steps


def typical_steps(spans: Sequence[Span]) -> dict[str, list[Span]]:
    """For every schedule all spans of the step of rank 0 (else of the lowest rank) whose length is the median; where
    that rank decodes nothing, the decode of the lowest rank that does is shown with them.

    The first step pays for warming up and the last may be cut short by a stop: both count only where there is
    nothing else.
    """
    if not spans:
        return {}
    rank = min(span.rank for span in spans)
    lengths: dict[str, dict[int, float]] = {}
    for (schedule, of_rank, step), members in by_step(tasks_only(spans)).items():
        if of_rank == rank:
            first, last = min(span.start_s for span in members), max(span.end_s for span in members)
            lengths.setdefault(schedule, {})[step] = last - first
    chosen: dict[str, list[Span]] = {}
    for schedule, of_steps in lengths.items():
        inner = sorted(of_steps)[1:-1] or sorted(of_steps)
        middle = statistics.median_low([of_steps[step] for step in inner])
        step = next(step for step in inner if of_steps[step] == middle)
        of_step = [span for span in spans if (span.schedule, span.step) == (schedule, step)]
        decode = [span for span in of_step if span.name == "decode"]
        decoding = min((span.rank for span in decode), default=rank)
        elsewhere = decode if decoding != rank else ()
        chosen[schedule] = [span for span in of_step if span.rank == rank]
        chosen[schedule] += [span for span in elsewhere if span.rank == decoding]
    return chosen
