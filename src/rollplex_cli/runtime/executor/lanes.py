"""A lane: one thread that owns an engine for its whole life."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class LaneThread:
    """Runs callables one after the other on a single thread.

    A ThreadPoolExecutor of one worker would do the same but for its exit: it joins its threads when the
    interpreter ends, and a thread that sits in a collective whose peer died would keep the process alive.
    This thread is a daemon.

    Args:
        name: thread name, as seen in stack dumps.
        set_up: runs first on the thread (device, stream, number of CPU threads).
    """

    def __init__(self, name: str, set_up: Callable[[], None] | None = None) -> None:
        self.name = name
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._set_up = set_up
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue `job`; its result or exception is in the future."""
        future: Future[T] = Future()
        self._jobs.put((future, job))
        return future

    def close(self, timeout_s: float) -> bool:
        """Ask the thread to end after its current job; False if it did not within `timeout_s`."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        failure: BaseException | None = None
        try:
            if self._set_up is not None:
                self._set_up()
        except BaseException as error:  # reported by every job instead of dying unseen
            failure = error
        while (item := self._jobs.get()) is not None:
            future, job = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                if failure is not None:
                    raise failure
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
