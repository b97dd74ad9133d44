"""The launch order of one replica inside one process: its log, its turns, what wakes a lane."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from rollplex_cli.runtime.launches.order import REPORT_EVERY, LaunchOrder
from rollplex_cli.runtime.launches.shared import RING, SharedLog, Unit

if TYPE_CHECKING:
    from collections.abc import Callable

R, T = Unit.ROLLOUT, Unit.TRAINER


@pytest.fixture
def pair() -> Iterator[tuple[LaunchOrder, LaunchOrder]]:
    """The rank that decides and one that follows, over the same memory."""
    log, path = SharedLog.create(1)
    first, second = LaunchOrder(log, None), LaunchOrder(SharedLog.open(path, 1), 0)
    yield first, second
    first.close()
    second.close()


def launch(order: LaunchOrder, *units: Unit) -> None:
    for unit in units:
        with order.turn(unit):
            pass


def in_thread(job: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=job, daemon=True)
    thread.start()
    return thread


def test_a_follower_waits_for_its_entry(pair: tuple[LaunchOrder, LaunchOrder]) -> None:
    first, second = pair
    seen: list[str] = []

    def lane(unit: Unit) -> None:
        with second.turn(unit):
            seen.append(unit.name)

    trainer, rollout = in_thread(lambda: lane(T)), in_thread(lambda: lane(R))
    launch(first, R)
    rollout.join(5)
    assert seen == ["ROLLOUT"]
    launch(first, T)
    trainer.join(5)
    assert seen == ["ROLLOUT", "TRAINER"]
    assert first.num_launched == second.num_launched == 2


def test_lanes_that_wait_are_served_as_they_came(pair: tuple[LaunchOrder, LaunchOrder]) -> None:
    """The lane that has the turn and wants another one comes after the lane that waits."""
    first, _ = pair
    seen: list[str] = []
    waits = threading.Event()
    first.check = waits.set

    def lane() -> None:
        with first.turn(T):
            seen.append("T")

    with first.turn(R):
        other = in_thread(lane)
        assert waits.wait(5)
    with first.turn(R):
        seen.append("R")
    other.join(5)
    assert seen == ["T", "R"]


def test_a_launch_within_a_launch_of_its_kind_is_an_error(pair: tuple[LaunchOrder, LaunchOrder]) -> None:
    first, _ = pair
    with first.turn(T), pytest.raises(RuntimeError, match="began within another one"):
        launch(first, T)
    launch(first, T)


class StoppedError(Exception):
    pass


def test_a_stop_wakes_lanes_that_wait(pair: tuple[LaunchOrder, LaunchOrder]) -> None:
    def stop() -> None:
        raise StoppedError

    first, second = pair
    first.check = second.check = stop
    with pytest.raises(StoppedError):
        launch(second, R)
    with first.turn(R), pytest.raises(StoppedError):
        launch(first, T)
    launch(first, T)  # who gave up is out of the queue


def test_a_launch_that_fails_ends_its_turn(pair: tuple[LaunchOrder, LaunchOrder]) -> None:
    first, _ = pair
    with pytest.raises(StoppedError), first.turn(R):
        raise StoppedError
    launch(first, T)
    assert first.num_launched == 2


def test_only_the_rollout_lane_listens_while_it_waits(pair: tuple[LaunchOrder, LaunchOrder]) -> None:
    first, second = pair
    heard: list[int] = []

    def listen() -> None:
        heard.append(threading.get_ident())
        if len(heard) == 1:
            launch(first, T, R)
            trainer.start()  # comes to its turn by what was heard

    second.meanwhile = listen
    trainer = threading.Thread(target=lambda: launch(second, T), daemon=True)
    launch(second, R)
    trainer.join(5)
    assert second.num_launched == 2
    assert set(heard) == {threading.get_ident()}


def test_the_ring_is_not_written_over_before_it_is_read(pair: tuple[LaunchOrder, LaunchOrder]) -> None:
    first, second = pair
    for number in range(RING):
        launch(first, Unit(number % 3 == 0))

    def stop() -> None:
        raise StoppedError

    first.check = stop
    with pytest.raises(StoppedError):
        launch(first, R)
    for number in range(REPORT_EVERY):
        launch(second, Unit(number % 3 == 0))
    launch(first, R)
    assert first.num_launched == RING + 1
    for number in range(REPORT_EVERY, RING):
        launch(second, Unit(number % 3 == 0))
    launch(second, R)  # of the second lap


def test_entries_of_another_lap_are_none_yet() -> None:
    log, _ = SharedLog.create(0)
    for number in (0, RING, 250 * RING):
        assert log.read(number) is None
        log.write(number, T)
        assert log.read(number) is T
        log.write(number, R)
        assert log.read(number) is R
    assert log.read(0) is None
    log.close()
