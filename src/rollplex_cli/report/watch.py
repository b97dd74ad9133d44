"""Follows the files of a run while it writes them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollplex_cli.core.status import PrepareStatus, RankStatus, read_prepare_status, read_status
from rollplex_cli.report.series import Row, merge_rows, steps_of

if TYPE_CHECKING:
    from pathlib import Path

    from rollplex_cli.core.paths import RunFolder


class JsonlTail:
    """Reads a growing file of JSON lines, each line once and only when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read_new(self) -> list[Row]:
        """Objects of the lines completed since the last call. A file that shrank is read from its start."""
        try:
            with self._path.open("rb") as stream:
                if stream.seek(0, 2) < self._offset:
                    self._offset = 0
                stream.seek(self._offset)
                chunk = stream.read()
        except OSError:
            return []
        whole, newline, _ = chunk.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        rows = []
        for line in whole.split(b"\n"):
            try:
                row = json.loads(line)
            except ValueError:
                # A process killed while writing leaves a torn line that a resumed one ends.
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows


@dataclass(slots=True)
class RunWatch:
    """The latest known state of a run. `poll` brings it up to date; reading touches nothing."""

    folder: RunFolder
    rows: list[Row] = field(default_factory=list)
    """All rows so far, one per step, ascending."""
    prepare: PrepareStatus | None = None
    cold_start: PrepareStatus | None = None
    """The last that the supervised cold start said, if there was one."""
    ranks: list[RankStatus] = field(default_factory=list)
    _tail: JsonlTail | None = None

    def poll(self) -> list[Row]:
        """Read what is new; returns the rows of training steps that are."""
        if self._tail is None:
            self._tail = JsonlTail(self.folder.metrics)
        new = self._tail.read_new()
        if new:
            self.rows = merge_rows([*self.rows, *new])
        self.prepare = read_prepare_status(self.folder.prepare_status) or self.prepare
        if self.prepare is not None and (self.prepare.stage == "cold_start" or self.prepare.accuracy is not None):
            self.cold_start = self.prepare
        # Rank numbers are counted up, not listed: a status half written under another name is no rank.
        self.ranks = []
        while (status := read_status(self.folder.status(len(self.ranks)))) is not None:
            self.ranks.append(status)
        return steps_of(merge_rows(new))

    @property
    def preparing(self) -> bool:
        """True until the preparation is done or a step is there."""
        return not steps_of(self.rows) and (self.prepare is None or self.prepare.stage != "done")

    @property
    def waiting(self) -> list[str]:
        """What ranks wait for, one line each."""
        return [f"rank {status.rank} waits for {item}" for status in self.ranks for item in status.waiting]
