"""Follows the files of a run while it writes them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollplex_cli.core.status import PrepareStatus, RankStatus, read_prepare_status, read_status
from rollplex_cli.report.series import Row, evaluation_rows, merge_rows, steps_of

if TYPE_CHECKING:
    from pathlib import Path

    from rollplex_cli.core.paths import RunFolder


class JsonlTail:
    """Reads a growing file of JSON lines, each line once and only when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0
        self.restarted = False
        """True when the last call found another file than the one before and read it from its start: a resumed run
        rewrites its files up to the checkpoint."""

    def read_new(self) -> list[Row]:
        """Objects of the lines completed since the last call."""
        self.restarted = False
        try:
            with self._path.open("rb") as stream:
                state = os.fstat(stream.fileno())
                self.restarted = self._offset > 0 and (state.st_ino != self._inode or state.st_size < self._offset)
                self._inode = state.st_ino
                if self.restarted:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a poll found."""

    steps: list[Row]
    """Rows of training steps, ascending."""
    evaluations: list[Row]
    """Rows with `step` and `eval`, ascending."""
    restarted: bool
    """True when the run went back to a checkpoint: `steps` are then all that are left."""


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
    _metrics: JsonlTail = field(init=False)
    _evaluations: JsonlTail = field(init=False)

    def __post_init__(self) -> None:
        self._metrics = JsonlTail(self.folder.metrics)
        self._evaluations = JsonlTail(self.folder.evaluations)

    def poll(self) -> News:
        """Read what is new."""
        new, evaluated = self._metrics.read_new(), evaluation_rows(self._evaluations.read_new())
        if self._metrics.restarted:
            # Steps after the checkpoint are not part of the run any more; evaluations are, where they still stand.
            self.rows = [{"step": row["step"], "eval": row["eval"]} for row in self.rows if "eval" in row]
        if new or evaluated:
            self.rows = merge_rows([*self.rows, *new, *evaluated])
        self.prepare = read_prepare_status(self.folder.prepare_status) or self.prepare
        if self.prepare is not None and (self.prepare.stage == "cold_start" or self.prepare.accuracy is not None):
            self.cold_start = self.prepare
        # Rank numbers are counted up, not listed: a status half written under another name is no rank.
        self.ranks = []
        while (status := read_status(self.folder.status(len(self.ranks)))) is not None:
            self.ranks.append(status)
        return News(
            steps=steps_of(merge_rows(new)), evaluations=merge_rows(evaluated), restarted=self._metrics.restarted
        )

    @property
    def preparing(self) -> bool:
        """True until the preparation is done or a step is there."""
        return not steps_of(self.rows) and (self.prepare is None or self.prepare.stage != "done")

    @property
    def waiting(self) -> list[str]:
        """What ranks wait for, one line each."""
        return [f"rank {status.rank} waits for {item}" for status in self.ranks for item in status.waiting]
