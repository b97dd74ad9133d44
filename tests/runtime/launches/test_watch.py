"""What a rank says about a collective that does not come back."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from runtime.stores import Dictionary

from rollplex_cli.core.errors import StallError
from rollplex_cli.core.status import read_status
from rollplex_cli.engines.collectives import CollectiveLog, GroupName
from rollplex_cli.runtime.control.control import Control
from rollplex_cli.runtime.control.peers import Peers
from rollplex_cli.runtime.executor.phases import PhaseMachine
from rollplex_cli.runtime.launches import watch
from rollplex_cli.runtime.launches.watch import CollectiveWatch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRAIN = GroupName("training group", (0, 1))


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every launch counts as old."""
    monkeypatch.setattr(watch, "QUIET_S", -1.0)
    monkeypatch.setattr(watch, "TELL_EVERY_S", -1.0)


@contextmanager
def inside(log: CollectiveLog, number: int) -> Iterator[None]:
    """The lane of `log` in its `number`-th all-reduce, on a thread of its own."""
    arrived, leave = threading.Event(), threading.Event()

    def lane() -> None:
        for _ in range(number - 1):
            with log.launch("all_reduce", TRAIN, 1 << 20):
                pass
        with log.launch("all_reduce", TRAIN, 5 << 18):
            arrived.set()
            leave.wait(20)

    thread = threading.Thread(target=lane, daemon=True)
    thread.start()
    assert arrived.wait(20)
    yield
    leave.set()
    thread.join(20)


def pair() -> tuple[CollectiveLog, CollectiveWatch, CollectiveLog, CollectiveWatch]:
    store = Dictionary()
    logs = CollectiveLog("trainer"), CollectiveLog("trainer")
    watches = [CollectiveWatch([log], Peers(store, rank, 2)) for rank, log in enumerate(logs)]
    return logs[0], watches[0], logs[1], watches[1]


def test_the_collective_is_named_and_who_is_behind() -> None:
    first, ours, second, theirs = pair()
    first.task = second.task = "actor_prefix[3]"
    for _ in range(2):
        with second.launch("all_reduce", TRAIN, 1 << 20):
            pass
    with inside(first, 3):
        theirs.tell()
        (line,) = ours.lines()
        assert line == (
            "trainer lane: all_reduce #3 of the training group in actor_prefix[3], 1.2 MiB, begun 0 s ago, not "
            "returned; rank 1 is at #2 in actor_prefix[3], finished"
        )
        with inside(second, 1):
            theirs.tell()
            assert "rank 1" not in ours.lines()[0]  # it is in the same one
        with second.launch("broadcast", GroupName("response group", (0, 1)), on_host=True):
            theirs.tell()
            assert "rank 1" not in ours.lines()[0]  # further than this rank, in another group
    assert ours.lines() == []


def test_a_member_that_says_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    first, ours, second, theirs = pair()
    with second.launch("all_reduce", TRAIN):
        pass
    with inside(first, 1):
        assert "rank 1" not in ours.lines()[0]  # it may be about to
        monkeypatch.setattr(watch, "SILENT_S", -1.0)
        assert ours.lines()[0].endswith("; rank 1 has said nothing")
        theirs.tell()
        assert ours.lines()[0].endswith("; rank 1 has said nothing for 0 s")


def test_a_lane_that_waits_for_its_turn_says_so() -> None:
    go, waits = threading.Event(), threading.Event()

    @contextmanager
    def turn() -> Iterator[None]:
        waits.set()
        go.wait(20)
        yield

    log = CollectiveLog("rollout", turn)

    def lane() -> None:
        with log.launch("forward batch", GroupName("rollout group", (0, 1))):
            pass

    thread = threading.Thread(target=lane, daemon=True)
    thread.start()
    assert waits.wait(20)
    (line,) = CollectiveWatch([log], Peers(None, 0, 1)).lines()
    assert line.endswith("forward batch #1 of the rollout group, begun 0 s ago, waits for its turn in the launch order")
    go.set()
    thread.join(20)
    assert log.last is not None and log.last.finished


def test_what_is_launched_is_finished_when_the_device_is() -> None:
    log = CollectiveLog("trainer")
    with log.launch("all_reduce", TRAIN):
        pass
    assert log.last is not None

    class Fence:
        passed = failed = False

        def query(self) -> bool:
            if self.failed:
                raise RuntimeError("an illegal memory access was encountered")
            return self.passed

    log.last.fence = fence = Fence()
    (line,) = CollectiveWatch([log], Peers(None, 0, 1)).lines()
    assert line.endswith("not finished")
    fence.passed = True
    assert CollectiveWatch([log], Peers(None, 0, 1)).lines() == []
    fence.failed = True
    assert CollectiveWatch([log], Peers(None, 0, 1)).lines() == [line]


def test_a_stall_names_the_collective(tmp_path: Path) -> None:
    log, peers = CollectiveLog("trainer"), Peers(None, 0, 1)
    control = Control(peers, PhaseMachine(), tmp_path / "rank0.json", stall_timeout_s=-1.0)
    control.watch_collectives(CollectiveWatch([log], peers))
    with inside(log, 7), pytest.raises(StallError, match=r"trainer lane: all_reduce #7 of the training group"):
        control.tick()
    status = read_status(tmp_path / "rank0.json")
    assert status is not None
    assert any("all_reduce #7" in line for line in status.waiting)
