"""State shared out over data-parallel ranks: the bits of one rank alone."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from engines.spawn import run_ranks
from hypothesis import given
from hypothesis import strategies as st

from rollplex_cli.engines.trainer.adamw.ranges import cut, owned_range
from rollplex_cli.engines.trainer.arena import ALIGNMENT, FlatLayout

WORKER = Path(__file__).with_name("shares_worker.py")


@given(units=st.integers(1, 500), ranks=st.integers(1, 70))
def test_ranges_are_aligned_and_cover_everything_once(units: int, ranks: int) -> None:
    size = units * ALIGNMENT
    found = [owned_range(size, ranks, rank) for rank in range(ranks)]
    assert found[0][0] == 0 and found[-1][1] == size
    assert all(before[1] == after[0] for before, after in itertools.pairwise(found))
    assert all(start % ALIGNMENT == 0 for start, _ in found)
    assert max(stop - start for start, stop in found) < size / ranks + ALIGNMENT


@given(decays=st.integers(0, 40), plain=st.integers(0, 40), start=st.integers(0, 80), chunk=st.integers(1, 9))
def test_chunks_are_aligned_and_of_one_kind(decays: int, plain: int, start: int, chunk: int) -> None:
    layout = FlatLayout((), decays * ALIGNMENT, (decays + plain) * ALIGNMENT)
    first = min(start * ALIGNMENT, layout.size)
    chunks = cut(layout, first, layout.size, chunk * ALIGNMENT)
    cursor = first
    for piece in chunks:
        assert piece.start == cursor and piece.start < piece.stop <= piece.start + chunk * ALIGNMENT
        assert (piece.stop <= layout.decay_end) if piece.decays else (piece.start >= layout.decay_end)
        cursor = piece.stop
    assert cursor == layout.size


@pytest.mark.scenario
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_that_share_train_as_one_alone(tmp_path: Path, world: int) -> None:
    run_ranks(world, lambda rank: [str(WORKER), str(rank), str(world), str(tmp_path / "store")], timeout_s=250)
