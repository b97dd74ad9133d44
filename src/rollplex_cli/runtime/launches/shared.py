"""The launch order of one rollout replica, in memory that its ranks share: one byte an entry, written by one of them.

An entry's byte holds what is launched and which lap of the ring it belongs to, so a single store publishes it: there is
no counter beside it whose store a reader could see first.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum

RING = 1 << 15
"""Entries before the ring is written over."""
_LAPS = 100
"""Laps that a byte tells apart; readers are never more than one behind."""
_CURSOR_BYTES = 8


class Unit(IntEnum):
    """What is launched as one."""

    ROLLOUT = 0
    """A forward batch of the rollout: a prefill, or one replay of a decode graph."""
    TRAINER = 1
    """One collective of the trainer."""


class SharedLog:
    """The entries of a replica's launch order. Entry n is the n-th launch, from 0.

    Args:
        descriptor: of the memory; kept open.
        num_readers: ranks that read what the first one writes.
    """

    def __init__(self, descriptor: int, num_readers: int) -> None:
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, RING + _CURSOR_BYTES * num_readers)
        view = memoryview(self._memory)
        self._entries = view[:RING]
        # Aligned machine words, each written by one process: stored and loaded in one piece.
        self._cursors = view[RING:].cast("Q")

    @classmethod
    def create(cls, num_readers: int) -> tuple[SharedLog, str]:
        """An empty log, and the path under which processes of the same user open it on this machine. It has no name in
        any folder, so nothing is left behind however its owner ends."""
        descriptor = os.memfd_create("rollplex-launches")
        os.ftruncate(descriptor, RING + _CURSOR_BYTES * num_readers)
        return cls(descriptor, num_readers), f"/proc/{os.getpid()}/fd/{descriptor}"

    @classmethod
    def open(cls, path: str, num_readers: int) -> SharedLog:
        """The log that another process has created.

        Raises:
            OSError: it cannot be opened here.
        """
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC), num_readers)

    def has_room(self, number: int) -> bool:
        """Whether every reader is past the entry that number `number` would write over."""
        return number < RING or all(number - seen < RING for seen in self._cursors)

    def write(self, number: int, unit: Unit) -> None:
        """Make `unit` entry `number`. One process only, in order, where there is room."""
        self._entries[number % RING] = _code(number, unit)

    def read(self, number: int) -> Unit | None:
        """Entry `number`; None if it was not written yet."""
        value = self._entries[number % RING]
        first = _code(number, Unit.ROLLOUT)
        return Unit(value - first) if first <= value <= first + 1 else None

    def passed(self, reader: int, number: int) -> None:
        """Reader `reader` is done with every entry before `number`."""
        self._cursors[reader] = number

    def close(self) -> None:
        """Let go of the memory."""
        self._entries.release()
        self._cursors.release()
        self._memory.close()
        os.close(self._descriptor)


def _code(number: int, unit: Unit) -> int:
    return 1 + 2 * (number // RING % _LAPS) + int(unit)
