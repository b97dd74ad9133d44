"""Who reads the weights theta_k: invariants 1 and B2 of the design, checked on every access."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import PhaseError

if TYPE_CHECKING:
    from collections.abc import Iterator


class ThetaGuard:
    """Readers-writer account of the weights. It never waits: the task graph must already have ordered access,
    so a conflict is a defect of the schedule and raises."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers: Counter[str] = Counter()
        self._writer: str | None = None
        self._version = 0

    @property
    def version(self) -> int:
        """k of theta_k; grows by one when a writer is done."""
        return self._version

    @property
    def readers(self) -> tuple[str, ...]:
        """Names of tasks reading now."""
        with self._lock:
            return tuple(sorted(self._readers.elements()))

    @contextmanager
    def read(self, name: str) -> Iterator[int]:
        """Hold theta readable for the task `name`; yields its version.

        Raises:
            PhaseError: a writer is active.
        """
        self.begin_read(name)
        try:
            yield self._version
        finally:
            self.end_read(name)

    def begin_read(self, name: str) -> None:
        """As `read`, for a reader that ends on another thread."""
        with self._lock:
            if self._writer is not None:
                raise PhaseError(f"`{name}` reads the weights while `{self._writer}` writes them")
            self._readers[name] += 1

    def end_read(self, name: str) -> None:
        """End what `begin_read` began."""
        with self._lock:
            if self._readers[name] <= 0:
                raise ValueError(f"`{name}` is no reader")
            self._readers[name] -= 1
            self._readers += Counter()  # drops zero counts

    @contextmanager
    def write(self, name: str) -> Iterator[None]:
        """Hold theta writable for the task `name`.

        Raises:
            PhaseError: a reader or another writer is active.
        """
        with self._lock:
            if self._writer is not None or self._readers:
                holders = self._writer or ", ".join(sorted(self._readers.elements()))
                raise PhaseError(f"`{name}` writes the weights while they are used by `{holders}`")
            self._writer = name
        try:
            yield
            with self._lock:
                self._version += 1
        finally:
            with self._lock:
                self._writer = None
