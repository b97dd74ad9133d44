"""One launch order for both lanes of every rank of a rollout replica (DESIGN.md beside `runtime`, "Launch order").

The replica's first rank decides: its lanes take turns in the order in which they come, and what each launches is
written down while it has the turn. On the other ranks a lane waits until the next entry is of its kind.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollplex_cli.runtime.launches.shared import Unit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rollplex_cli.runtime.launches.shared import SharedLog

FIRST_PAUSE_S, LONGEST_PAUSE_S = 20e-6, 400e-6
"""A lane that waits looks again after these: a decode step is ten milliseconds, and a look holds the interpreter."""
LOOK_AROUND_S = 1e-3
"""How often a lane that waits asks whether the step was stopped."""
REPORT_EVERY = 256
"""Launches between two reports of how far a follower has come."""


class LaunchOrder:
    """A rank's part in its replica's launch order.

    A turn belongs to a kind of launch, not to a thread: a backward launches from autograd's threads while the trainer
    lane waits for it. There is one launch of a kind at a time; a second is an error of the program.

    Args:
        log: shared with the replica's other ranks.
        reader: this rank's number among those that follow; None on the rank that decides.
    """

    def __init__(self, log: SharedLog, reader: int | None) -> None:
        self._log, self._reader = log, reader
        self._next = 0
        """Number of the next entry."""
        self._under_way: set[Unit] = set()
        self._turns = threading.Condition()
        self._queue: list[Unit] = []
        """On the rank that decides: kinds that want a turn or have it, the first of them now."""
        self.check: Callable[[], None] = lambda: None
        """Raises if the step was stopped; asked by lanes that wait."""
        self.meanwhile: Callable[[], object] = lambda: None
        """Called by the rollout lane while it waits, every `LOOK_AROUND_S`: what the trainer lane of this rank needs
        before it can come to its turn must not wait for the rollout lane."""

    @property
    def num_launched(self) -> int:
        """Entries that this rank is done with."""
        return self._next

    @contextmanager
    def turn(self, unit: Unit) -> Iterator[None]:
        """Around one launch: begins when it is this kind's turn, ends it when the launch has returned.

        Raises:
            RuntimeError: a launch within a launch of the same kind.
            Exception: whatever `check` raises.
        """
        if unit in self._under_way:
            raise RuntimeError(f"a launch of the {unit.name.lower()} began within another one")
        self._under_way.add(unit)
        try:
            if self._reader is None:
                self._decide(unit)
            else:
                self._follow(unit)
            try:
                yield
            finally:
                self._end(unit)
        finally:
            self._under_way.discard(unit)

    def _decide(self, unit: Unit) -> None:
        """Wait for the turn in the order of arrival, then make it everybody's."""
        with self._turns:
            self._queue.append(unit)
            first = len(self._queue) == 1
        try:
            while not (first or self._is_first(unit)):
                self._look_around(unit)
            while not self._log.has_room(self._next):
                self._look_around(unit)
                time.sleep(LONGEST_PAUSE_S)
        except BaseException:
            self._leave_queue(unit)
            raise
        self._log.write(self._next, unit)

    def _is_first(self, unit: Unit) -> bool:
        """Waits for it a little."""
        with self._turns:
            return self._turns.wait_for(lambda: self._queue[0] is unit, LOOK_AROUND_S)

    def _follow(self, unit: Unit) -> None:
        """Wait until the next entry is of this kind. It may be written and still be the other lane's to pass."""
        pause, looked = FIRST_PAUSE_S, time.monotonic()
        while self._log.read(self._next) is not unit:
            if time.monotonic() - looked > LOOK_AROUND_S:
                self._look_around(unit)
                looked = time.monotonic()
            time.sleep(pause)
            pause = min(1.5 * pause, LONGEST_PAUSE_S)

    def _look_around(self, unit: Unit) -> None:
        self.check()
        if unit is Unit.ROLLOUT:
            self.meanwhile()

    def _end(self, unit: Unit) -> None:
        # Before the other kind may begin: it reads the number of its entry.
        self._next += 1
        if self._reader is None:
            self._leave_queue(unit)
        elif self._next % REPORT_EVERY == 0:
            self._log.passed(self._reader, self._next)

    def _leave_queue(self, unit: Unit) -> None:
        with self._turns:
            self._queue.remove(unit)
            if self._queue:
                self._turns.notify_all()

    def close(self) -> None:
        """Let go of the shared memory. No lane may launch afterwards."""
        self._log.close()
