"""Worker processes that hang, crash and raise."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from rollplex_cli.core.errors import DataError
from rollplex_cli.core.workers import WorkerCallError, WorkerDiedError, WorkerPool, WorkerTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable


def set_up(offset: int) -> Callable[[Any], Any]:
    def handle(item: Any) -> Any:
        if item == "hang":
            time.sleep(60)
        if item == "crash":
            os._exit(7)
        if item == "raise":
            raise KeyError("theirs")
        if item == "data":
            raise DataError("no such row: 3", hint="look")
        return (item + offset, os.getpid())

    return handle


def broken_set_up() -> Callable[[Any], Any]:
    raise ValueError("cannot start")


def test_a_pool_survives_what_its_workers_do() -> None:
    with WorkerPool(set_up, (10,), num_workers=1, name="test") as pool:
        value, first = pool.call(1)
        assert value == 11
        with pytest.raises(WorkerCallError, match="KeyError: 'theirs'"):
            pool.call("raise")
        with pytest.raises(DataError, match="no such row: 3") as found:
            pool.call("data")
        assert found.value.hint == "look"
        assert pool.call(2) == (12, first)  # an exception costs no process
        started = time.monotonic()
        with pytest.raises(WorkerTimeoutError, match=r"0\.3 s"):
            pool.call("hang", 0.3)
        assert time.monotonic() - started < 5
        value, second = pool.call(3)
        assert (value, second != first) == (13, True)
        with pytest.raises(WorkerDiedError, match="code: 7"):
            pool.call("crash")
        assert pool.call(4)[0] == 14


def test_calls_run_side_by_side() -> None:
    with WorkerPool(set_up, (0,), num_workers=2, name="test") as pool, ThreadPoolExecutor(4) as threads:
        results = list(threads.map(pool.call, range(8)))
    assert [value for value, _ in results] == list(range(8))


def test_a_set_up_that_fails_is_reported_by_every_call() -> None:
    with WorkerPool(broken_set_up, (), num_workers=1, name="test") as pool:
        for _ in range(2):
            with pytest.raises(WorkerCallError, match="ValueError: cannot start"):
                pool.call(1)


def test_closing_ends_busy_workers() -> None:
    pool = WorkerPool(set_up, (0,), num_workers=1, name="test")
    pool.call(1)
    with ThreadPoolExecutor(1) as threads:
        job = threads.submit(pool.call, "hang")
        time.sleep(2.0)  # long enough for the call to have begun on a loaded machine, too
        pool.close()
        with pytest.raises(WorkerDiedError):
            job.result(timeout=10)
