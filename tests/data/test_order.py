"""The order of samples: complete epochs, any degree of data parallelism, no state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex_cli.data.order import BatchOrder


@given(
    num_samples=st.integers(1, 40),
    per_rank=st.integers(1, 5),
    num_ranks=st.sampled_from([1, 2, 3, 4]),
    seed=st.integers(0, 2**31),
    step=st.integers(0, 30),
)
def test_ranks_own_contiguous_slices_of_one_batch(
    num_samples: int, per_rank: int, num_ranks: int, seed: int, step: int
) -> None:
    size = per_rank * num_ranks
    whole = BatchOrder(num_samples, seed=seed, prompts_per_step=size)
    parts = [
        BatchOrder(num_samples, seed=seed, prompts_per_step=size, rank=rank, num_ranks=num_ranks)
        for rank in range(num_ranks)
    ]
    assert [row for part in parts for row in part.batch(step)] == whole.batch(step)
    assert [part.first_slot for part in parts] == [rank * per_rank for rank in range(num_ranks)]


@given(num_samples=st.integers(1, 30), size=st.integers(1, 7), seed=st.integers(0, 100))
def test_every_epoch_shows_every_sample_once(num_samples: int, size: int, seed: int) -> None:
    order = BatchOrder(num_samples, seed=seed, prompts_per_step=size)
    steps = -(-3 * num_samples // size)
    rows = [row for step in range(steps) for row in order.batch(step)]
    for epoch in range(3):
        part = rows[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(part) == list(range(num_samples))


def test_epochs_and_seeds_differ_and_the_order_is_pinned() -> None:
    order = BatchOrder(8, seed=0, prompts_per_step=8)
    assert order.batch(0) != order.batch(1)
    assert order.batch(0) != BatchOrder(8, seed=1, prompts_per_step=8).batch(0)
    # A change of this list breaks the resume of every running job.
    assert order.batch(0) == PINNED


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="cannot be dealt"):
        BatchOrder(8, seed=0, prompts_per_step=3, num_ranks=2)
    with pytest.raises(ValueError, match="cannot be dealt"):
        BatchOrder(8, seed=0, prompts_per_step=4, rank=2, num_ranks=2)
    with pytest.raises(ValueError, match="needs samples"):
        BatchOrder(0, seed=0, prompts_per_step=4)


PINNED = [6, 3, 5, 0, 7, 2, 1, 4]
