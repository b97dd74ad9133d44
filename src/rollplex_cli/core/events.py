"""Spans of tasks and phases, one JSON line each, written by a rank and read by the report.

A line is {"name", "t0", "t1", "step", "phase", "lane", "group", "rank", ...}; times are seconds since the epoch.
A span that ended with an exception also has "error".
"""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.files import read_jsonl

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class EventWriter:
    """Appends events to one file; any thread may write.

    Args:
        path: the file, created with its folder where missing.
        rank: stamped on every line.
    """

    def __init__(self, path: Path, rank: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = _ends_torn(path)
        self._rank = rank
        self._lock = threading.Lock()
        # One anchor for the whole file: spans order and subtract correctly even if the wall clock is set meanwhile.
        self._anchor = time.time() - time.monotonic()
        self._stream = path.open("a", encoding="utf-8", buffering=1)
        if torn:
            self._stream.write("\n")

    def now(self) -> float:
        """Seconds since the epoch, on this file's monotonic clock."""
        return self._anchor + time.monotonic()

    @contextmanager
    def span(
        self, name: str, *, step: int, phase: str, lane: str, group: int | None = None, **fields: Any
    ) -> Iterator[dict[str, Any]]:
        """Time the block and write its span when it ends. Keys put into the yielded dict are written too."""
        started = self.now()
        extra: dict[str, Any] = dict(fields)
        try:
            yield extra
        except BaseException as error:
            extra["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            self.record(name, started, self.now(), step=step, phase=phase, lane=lane, group=group, **extra)

    def point(self, name: str, *, step: int, phase: str, lane: str, group: int | None = None, **fields: Any) -> None:
        """Write an event without duration."""
        now = self.now()
        self.record(name, now, now, step=step, phase=phase, lane=lane, group=group, **fields)

    def record(self, name: str, t0: float, t1: float, **fields: Any) -> None:
        """Write a span whose times were taken elsewhere with `now`. After `close` nothing is written."""
        row = {"name": name, "t0": round(t0, 6), "t1": round(t1, 6), **fields, "rank": self._rank}
        line = json.dumps(row, default=str) + "\n"
        with self._lock:
            if not self._stream.closed:
                self._stream.write(line)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            self._stream.close()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Every whole event of a file, in the order written."""
    return [row for row in read_jsonl(path) if "name" in row and "t0" in row]


def _ends_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as stream:
        stream.seek(-1, 2)
        return stream.read(1) != b"\n"
