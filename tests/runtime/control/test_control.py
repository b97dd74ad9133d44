"""Agreement among ranks, failures that travel, and the stall clock."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, cast

import pytest
from runtime.stores import Dictionary

from rollplex_cli.core.errors import PeerFailedError, PhaseError, StallError
from rollplex_cli.core.names import Phase
from rollplex_cli.core.status import read_status
from rollplex_cli.runtime.control.control import Control
from rollplex_cli.runtime.control.peers import Peers
from rollplex_cli.runtime.executor.phases import PhaseMachine

if TYPE_CHECKING:
    from pathlib import Path

    from rollplex_cli.runtime.executor.executor import Executor


def pair() -> tuple[Dictionary, Peers, Peers]:
    store = Dictionary()
    return store, Peers(store, 0, 2), Peers(store, 1, 2)


def nothing() -> None:
    return None


def test_everybody_gets_everybodys_value_exactly() -> None:
    _, first, second = pair()
    got: list[list[dict[str, float]]] = []
    other = threading.Thread(target=lambda: got.append(second.meet("sums", {"x": 0.1 + 0.2}, nothing)))
    other.start()
    mine = first.meet("sums", {"x": 1e-300}, nothing)
    other.join(5)
    assert mine == got[0] == [{"x": 1e-300}, {"x": 0.1 + 0.2}]


def test_keys_do_not_pile_up() -> None:
    store, first, second = pair()
    for _ in range(20):
        other = threading.Thread(target=lambda: second.meet("step", {}, nothing))
        other.start()
        first.meet("step", {}, nothing)
        other.join(5)
    assert len(store.values) <= 6


def test_ranks_at_different_agreements_are_told() -> None:
    _, first, second = pair()
    told: list[str] = []

    def other() -> None:
        with pytest.raises(PhaseError) as caught:
            second.meet("UPDATE", {}, nothing)
        told.append(caught.value.message)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    with pytest.raises(PhaseError, match="rank 0 is at `LEARN` while rank 1 is at `UPDATE`"):
        first.meet("LEARN", {}, nothing)
    thread.join(5)
    assert told == ["rank 1 is at `UPDATE` while rank 0 is at `LEARN`"]


def test_a_failure_reaches_a_waiting_peer_with_its_reason() -> None:
    _, first, second = pair()
    threading.Timer(0.1, lambda: second.announce_failure("out of memory")).start()
    with pytest.raises(PeerFailedError, match="rank 1 failed: out of memory"):
        first.meet("sums", {}, nothing)
    first.announce_failure("because of rank 1")
    with pytest.raises(PeerFailedError, match="out of memory"):  # the first reason stays
        first.check_failure()
    second.check_failure()  # its own failure is no news to the one that failed


def control(tmp_path: Path, peers: Peers, stall_s: float) -> Control:
    return Control(peers, PhaseMachine(), tmp_path / "rank0.json", stall_s)


def test_a_stall_names_what_was_waited_for(tmp_path: Path) -> None:
    watch = control(tmp_path, Peers(None, 0, 1), 0.3)
    with pytest.raises(StallError, match="completed nothing for .* control: building the trainer"):
        watch.await_future(Future(), "building the trainer")


def test_building_engines_may_take_longer_than_a_task(tmp_path: Path) -> None:
    watch = Control(Peers(None, 0, 1), PhaseMachine(), tmp_path / "rank0.json", 0.2, 1.0)
    built: Future[str] = Future()
    threading.Timer(0.6, lambda: built.set_result("engine")).start()
    assert watch.await_future(built, "building the rollout engine") == "engine"
    with pytest.raises(StallError, match="building the trainer") as caught:
        watch.await_future(Future(), "building the trainer")
    assert "`runtime.start_timeout_s`" in str(caught.value.hint)
    watch.watch(cast("Executor", object()))  # the first step begins
    watch.watch(None)
    with pytest.raises(StallError) as caught:
        watch.await_future(Future(), "agreeing on a step")
    assert "`runtime.stall_timeout_s`" in str(caught.value.hint)


def test_waiting_for_a_peer_that_gets_on_is_no_stall(tmp_path: Path) -> None:
    _, first, second = pair()
    watch = control(tmp_path, first, 0.8)
    watch.doing("phase LEARN")

    def work() -> None:
        for mark in range(8):
            second.report_progress(str(mark))
            time.sleep(0.3)
        second.meet("LEARN", {}, nothing)

    threading.Thread(target=work, daemon=True).start()
    first.meet("LEARN", {}, watch.tick)  # takes three times the limit


def test_waiting_for_a_peer_that_stands_still_is_a_stall_and_names_it(tmp_path: Path) -> None:
    _, first, _ = pair()
    watch = control(tmp_path, first, 0.4)
    watch.doing("phase LEARN")
    with pytest.raises(StallError, match="control: rank 1 to arrive there too"):
        first.meet("LEARN", {}, watch.tick)


def test_the_status_file_says_what_is_waited_for(tmp_path: Path) -> None:
    watch = control(tmp_path, Peers(None, 0, 1), 100.0)
    watch.step = 4
    watch.doing("writing the checkpoint")
    watch.tick()
    status = read_status(tmp_path / "rank0.json")
    assert status is not None
    assert (status.state, status.step, status.phase) == ("running", 4, str(Phase.PUBLISH))
    assert status.waiting == ["control: writing the checkpoint"]
