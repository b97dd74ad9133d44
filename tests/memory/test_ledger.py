"""Invariants L1-L4."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.memory.ledger import Ledger, LedgerSnapshot


def test_a_block_has_one_owner_and_goes_once() -> None:  # L1
    ledger = Ledger()
    ledger.acquire(1, "weights", 10)
    with pytest.raises(ValueError, match="has an owner already: `weights`"):
        ledger.acquire(1, "kv", 10)
    ledger.release(1)
    with pytest.raises(ValueError, match="released twice or never acquired"):
        ledger.release(1)
    with pytest.raises(ValueError, match="at least one byte: 0"):
        ledger.acquire(2, "kv", 0)
    assert ledger.snapshot() == LedgerSnapshot({})


@given(st.lists(st.tuples(st.integers(0, 9), st.sampled_from(["a", "b", "c"]), st.integers(1, 100)), max_size=60))
def test_sums_are_those_of_the_blocks(steps: list[tuple[int, str, int]]) -> None:  # L2
    ledger = Ledger()
    blocks: dict[int, tuple[str, int]] = {}
    for block, owner, size in steps:
        if block in blocks:
            ledger.release(block)
            del blocks[block]
        else:
            ledger.acquire(block, owner, size)
            blocks[block] = (owner, size)
        by_owner = {
            name: total for name in "abc" if (total := sum(size for owner, size in blocks.values() if owner == name))
        }
        assert ledger.snapshot().by_owner == by_owner
        assert ledger.total_bytes == ledger.snapshot().total_bytes == sum(by_owner.values())
        assert ledger.held_by("a") == by_owner.get("a", 0)


def test_changes_between_two_moments_name_who_grew_and_who_shrank() -> None:  # L3
    ledger = Ledger()
    ledger.acquire("x", "weights", 10)
    ledger.acquire("y", "kv", 5)
    before = ledger.snapshot()
    ledger.release("y")
    ledger.acquire("z", "gradients", 7)
    assert before.changes_to(ledger.snapshot()) == {"gradients": 7, "kv": -5}
    assert before.changes_to(before) == {}


def test_a_count_that_differs_is_an_error_with_every_owner() -> None:  # L4
    ledger = Ledger()
    ledger.acquire("x", "weights", 10)
    ledger.acquire("y", "kv", 5)
    ledger.check(15)
    with pytest.raises(RunFailedError, match=r"has 15 bytes \(`weights` 10, `kv` 5\), the driver counts: 16"):
        ledger.check(16)
    with pytest.raises(RunFailedError, match="nobody holds any"):
        Ledger().check(1)
