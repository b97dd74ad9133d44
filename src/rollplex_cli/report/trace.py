"""Events as a Chrome trace, to be opened in Perfetto or chrome://tracing.

Format: the "Trace Event Format" document of the Chromium project; complete events ("ph": "X"), times in microseconds.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.files import write_atomic
from rollplex_cli.report.spans import PHASE, Span, intervals_of, pack

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

TRACKS_PER_LANE = 1000
LANES = ("control", "rollout", "trainer", "host")


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """The trace as a JSON-ready object: a process per rank, and per lane as many threads as spans overlap.

    Viewers nest overlapping events of one thread, so groups that decode together get a thread each.
    """
    origin = min((span.start_s for span in spans), default=0.0)
    lanes: dict[tuple[int, str], list[Span]] = {}
    for span in spans:
        lanes.setdefault((span.rank, span.lane), []).append(span)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}}
        for rank in sorted({rank for rank, _ in lanes})
    ]
    for (rank, lane), members in sorted(lanes.items()):
        base = (LANES.index(lane) if lane in LANES else len(LANES)) * TRACKS_PER_LANE
        tracks = pack(intervals_of(members))
        for track in sorted(set(tracks)):
            label = lane if track == 0 else f"{lane} ({track + 1})"
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": base + track, "args": {"name": label}})
        events += [_complete(span, base + track, origin) for span, track in zip(members, tracks, strict=True)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _complete(span: Span, thread: int, origin: float) -> dict[str, Any]:
    label = span.phase if span.name == PHASE else span.name
    return {
        "ph": "X",
        "name": label if span.group is None else f"{label}[{span.group}]",
        "cat": span.lane,
        "ts": round((span.start_s - origin) * 1e6, 3),
        "dur": round((span.end_s - span.start_s) * 1e6, 3),
        "pid": span.rank,
        "tid": thread,
        "args": {"step": span.step, "phase": span.phase, "schedule": span.schedule},
    }


def write_trace(spans: Sequence[Span], path: Path) -> None:
    """Write the trace as JSON."""
    write_atomic(path, json.dumps(chrome_trace(spans)))
