"""The merged order of decoded groups, and what the leader says."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.runtime.team.board import FINISHED, DecodeBoard, MergedOrder
from rollplex_cli.runtime.team.word import LeaderWord


class DictStore:
    """The part of the store that is used, in one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def clone(self) -> DictStore:
        return self


def test_a_group_waits_until_nothing_can_come_before_it() -> None:
    order = MergedOrder(2, 3)
    order.report(0, 5, [(5, 7)])
    assert order.release() == []  # replica 1 may still complete something at step 5 or before
    order.report(1, 4, [(3, 2)])
    assert order.release() == [2]
    order.report(1, 5, [(3, 2), (5, 1)])
    assert order.release() == [7, 1]  # same step: by replica, whatever the ids
    assert order.complete


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 12), st.integers(0, 10_000))
def test_every_rank_finds_the_same_order_whatever_it_hears_when(replicas: int, groups: int, seed: int) -> None:
    rng = random.Random(seed)
    ends = {g: rng.randint(1, 6) for g in range(groups)}
    mine = {b: [g for g in range(groups) if g % replicas == b] for b in range(replicas)}
    expected = [g for _, _, g in sorted((ends[g], g % replicas, g) for g in range(groups))]
    store, found = DictStore(), {b: list[int]() for b in range(replicas)}
    boards = [DecodeBoard(store if replicas > 1 else None, "x", b, replicas, posts=True) for b in range(replicas)]
    clocks = [0] * replicas
    for board in boards:
        board.begin_step(3, groups)
    while not all(board.complete for board in boards):
        b = rng.randrange(replicas)
        last = max((ends[g] for g in mine[b]), default=0)
        done: list[tuple[int, int]] = []
        if clocks[b] < last:
            clocks[b] += 1
            done = [(clocks[b], g) for g in mine[b] if ends[g] == clocks[b]]
        boards[b].advance(clocks[b], done, finished=clocks[b] >= last)
        if rng.random() < 0.7:
            boards[b].listen()
        found[b] += boards[b].release()
    assert all(order == expected for order in found.values())


def test_what_was_said_of_another_step_is_ignored() -> None:
    store = DictStore()
    first, second = (DecodeBoard(store, "x", b, 2, posts=True) for b in range(2))
    first.begin_step(1, 1)
    first.advance(FINISHED, [(2, 0)], finished=True)
    second.begin_step(2, 1)
    assert not second.listen()
    second.advance(0, [], finished=True)
    assert second.release() == [] and not second.complete


def test_a_rank_that_decodes_nothing_hears_the_order_and_says_nothing() -> None:
    store = DictStore()
    first, second = (DecodeBoard(store, "x", b, 2, posts=True) for b in range(2))
    listener = DecodeBoard(store, "x", None, 2, posts=False)
    for board in (first, second, listener):
        board.begin_step(1, 2)
    listener.advance(0, [], finished=True)
    assert not store.values and not listener.listen() and listener.release() == []
    second.advance(3, [(3, 1)], finished=True)
    assert listener.listen() and listener.release() == []  # replica 0 may still complete something before
    first.advance(2, [(2, 0)], finished=True)
    assert listener.listen() and listener.release() == [0, 1] and listener.complete


def test_the_leaders_word_is_taken() -> None:
    store = DictStore()
    leader, other = LeaderWord(store, "x", leads=True), LeaderWord(store, "x", leads=False)
    assert leader.of(1, "reward/0", lambda: [0.1 + 0.2], lambda: None) == [0.1 + 0.2]

    def never() -> float:
        raise AssertionError("only the leader asks")

    assert other.of(1, "reward/0", never, lambda: None) == [0.1 + 0.2]

    def stopped() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        other.of(1, "reward/1", never, stopped)
    for step in (2, 3):
        leader.of(step, "reward/0", lambda: 1.0, lambda: None)
    assert sorted(store.values) == ["x/word/2/reward/0", "x/word/3/reward/0"]
    assert LeaderWord(None, "x", leads=True).of(1, "a", lambda: 5, lambda: None) == 5
