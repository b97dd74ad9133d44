"""Worker processes for work that may hang, crash or hold the interpreter: decoding and reward functions.

A call that takes too long ends its process, and only that one; the next call finds a fresh one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import threading
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import RollplexError

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection
    from types import TracebackType

START_TIMEOUT_S = 180.0
"""How long a process may take to import what it needs; PyTorch alone takes seconds on a busy machine."""


class WorkerError(Exception):
    """A call that did not return; base of what `WorkerPool.call` raises of its own."""


class WorkerTimeoutError(WorkerError):
    """The call took longer than it may; its process was killed."""


class WorkerDiedError(WorkerError):
    """The process ended during the call (a crash in native code, or the system ran out of memory)."""


class WorkerCallError(WorkerError):
    """The function raised; the message is `Type: text`."""


class WorkerPool:
    """Processes that each hold a handler made by `setup` and answer one call at a time.

    `call` may be used from several threads, as many of which run at once as there are workers. Processes are
    spawned, not forked (a fork of a process with threads can deadlock), when first needed.

    Args:
        setup: module-level function that runs in each process; returns the handler of its calls.
        arguments: of `setup`, picklable.
        num_workers: number of processes.
        name: of the processes, for whoever looks at a list of them.
    """

    def __init__(
        self, setup: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...], *, num_workers: int, name: str
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"a pool needs at least one worker, got: {num_workers}")
        self._setup, self._arguments, self._name = setup, arguments, name
        self._idle: queue.Queue[_Worker | None] = queue.Queue()
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._closed = False
        for _ in range(num_workers):
            self._idle.put(None)

    def call(self, item: object, timeout_s: float | None = None) -> Any:
        """What the handler returns for `item`.

        Raises:
            RollplexError: raised by the handler or by `setup`, as it is.
            WorkerCallError: any other exception of the handler or of `setup`.
            WorkerTimeoutError, WorkerDiedError: see there. The pool stays usable.
        """
        worker = self._idle.get()
        try:
            if worker is None:
                worker = self._spawn()
            return worker.call(item, timeout_s)
        except (WorkerTimeoutError, WorkerDiedError):
            self._drop(worker)
            worker = None
            raise
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """Kill every process, busy or not. A second call does nothing."""
        with self._lock:
            self._closed = True
            workers, self._workers = self._workers, set()
        for worker in workers:
            worker.kill()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _spawn(self) -> _Worker:
        worker = _Worker(self._setup, self._arguments, self._name)
        with self._lock:
            if self._closed:
                worker.kill()
                raise WorkerDiedError("the pool is closed")
            self._workers.add(worker)
        try:
            worker.wait_ready()
        except BaseException:
            self._drop(worker)
            raise
        return worker

    def _drop(self, worker: _Worker | None) -> None:
        if worker is not None:
            with self._lock:
                self._workers.discard(worker)
            worker.kill()


class _Worker:
    """This side of one process."""

    def __init__(self, setup: Callable[..., Any], arguments: tuple[Any, ...], name: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, setup, arguments), name=name, daemon=True)
        self._process.start()
        self._closing = threading.Lock()
        theirs.close()

    def wait_ready(self) -> None:
        """Until `setup` returned."""
        self._answer(START_TIMEOUT_S)

    def call(self, item: object, timeout_s: float | None) -> Any:
        """One call."""
        try:
            self._pipe.send(item)
        except OSError:
            raise self._died() from None
        return self._answer(timeout_s)

    def kill(self) -> None:
        """End the process whatever it does. Any thread, and again: whoever waits for its answer does so, too."""
        self._process.kill()
        self._process.join(5.0)
        with self._closing:
            self._pipe.close()

    def _answer(self, timeout_s: float | None) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise WorkerTimeoutError(f"no answer within {timeout_s:g} s")
            good, value = self._pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None
        except WorkerTimeoutError:
            raise
        except Exception as error:  # of a class that is not known on this side
            raise WorkerCallError(f"its answer cannot be read: {type(error).__name__}: {error}") from None
        if good:
            return value
        raise value if isinstance(value, RollplexError) else WorkerCallError(value)

    def _died(self) -> WorkerDiedError:
        self._process.join(5.0)
        return WorkerDiedError(f"its process ended with code: {self._process.exitcode}")


def _serve(pipe: Connection, setup: Callable[..., Callable[[Any], Any]], arguments: tuple[Any, ...]) -> None:
    """A worker process: set up, then answer until the other side closes."""
    # The parent decides when its workers end: a signal meant for the run must not take one away in mid-call.
    for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2"):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, OSError):
        try:
            handler = setup(*arguments)
        except Exception as error:
            pipe.send((False, _portable(error)))
            return
        pipe.send((True, None))
        while True:
            item = pipe.recv()
            try:
                answer = (True, handler(item))
            except Exception as error:
                answer = (False, _portable(error))
            try:
                pipe.send(answer)
            except (EOFError, OSError):
                raise
            except Exception as error:  # an answer that cannot be sent; nothing of it was
                pipe.send((False, _portable(error)))


def _end_with_parent() -> None:
    """A handler that hangs would otherwise outlive a parent that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _portable(error: Exception) -> RollplexError | str:
    return error if isinstance(error, RollplexError) else f"{type(error).__name__}: {error}"
