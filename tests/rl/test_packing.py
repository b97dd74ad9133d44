"""Packed suffixes and their mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollplex_cli.rl.packing import pack_suffix, suffix_mask


def test_by_hand() -> None:
    packed = pack_suffix(9, 5, -2, [[1, 2, 3], [4]])
    assert packed.token_ids.tolist() == [9, 1, 2, 9]
    assert packed.targets.tolist() == [1, 2, 3, 4]
    assert packed.segments.tolist() == [0, 0, 0, 1]
    # The last prompt token has position P - 1 + delta = 2.
    assert packed.position_ids.tolist() == [[2, 3, 4, 2]] * 3
    assert packed.lengths == (3, 1) and packed.num_tokens == 4


def test_mask_by_hand() -> None:
    mask = suffix_mask(torch.tensor([0, 0, 1]), 2)
    expected = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    assert mask.to(torch.int64).tolist() == expected


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), prefix=st.integers(0, 4))
def test_every_row_sees_the_prefix_and_its_own_past(lengths: list[int], prefix: int) -> None:
    packed = pack_suffix(1, prefix + 1, 0, [[7] * n for n in lengths])
    mask = suffix_mask(packed.segments, prefix)
    assert mask[:, :prefix].all()
    ranks = [i for n in lengths for i in range(n)]
    assert mask[:, prefix:].sum(1).tolist() == [rank + 1 for rank in ranks]
    assert packed.position_ids[0].tolist() == [prefix + rank for rank in ranks]


@pytest.mark.parametrize("responses", [[], [[1], []]])
def test_empty_responses_are_refused(responses: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        pack_suffix(1, 2, 0, responses)
