"""The memory of the KV pool, and of weights that only decode reads, for the decode of one step."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

from rollplex_cli.memory.residency import DECODES

if TYPE_CHECKING:
    from rollplex_cli.engines.rollout.base import RolloutEngine
    from rollplex_cli.memory.residency import Residency


class DecodePool:
    """Opened once and ended once, both on the rollout lane."""

    def __init__(self, residency: Residency, engine: RolloutEngine) -> None:
        self._residency, self._engine = residency, engine
        self._lease = contextlib.ExitStack()
        self._opened = threading.Event()
        self._ended = False

    def open(self) -> None:
        """Map the pool for this step's decode.

        Raises:
            OutOfMemoryError: over `memory.budget_gib`, or the device is full.
        """
        try:
            if self._residency.is_placed("rollout_kv"):  # a rank that only trains has none
                self._lease.enter_context(self._residency.lease("rollout_kv", DECODES))
        finally:
            self._opened.set()

    def wait_opened(self) -> None:
        """For the trainer lane: what it maps may come from the host and take ten times as long, and everything waits
        for decode."""
        self._opened.wait()

    def end(self) -> None:
        """Nothing in this step will read the pool again: forget the prompts in it and let its memory go. Idempotent."""
        if not self._ended:
            self._ended = True
            self._engine.drop_caches()
            self._lease.close()
            self._residency.end("rollout_kv", DECODES)
            self._residency.punch("snapshot", DECODES)

    def abandon(self) -> None:
        """The step failed: only give the lease back."""
        self._lease.close()
