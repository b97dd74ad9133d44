"""Places of tensors in a range."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from rollplex_cli.memory.slots import SlotTable, packed_bytes

DTYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.int64])
SPECS = st.lists(st.tuples(st.lists(st.integers(1, 5), max_size=3), DTYPES), min_size=1, max_size=12)


@given(SPECS, st.sampled_from([8, 64, 512]))
def test_packing_fits_exactly_and_never_overlaps(specs: list[tuple[list[int], torch.dtype]], alignment: int) -> None:
    size = packed_bytes(specs, alignment)
    table = SlotTable("weights", size)
    for number, (shape, dtype) in enumerate(specs):
        slot = table.place(str(number), shape, dtype, offset=None, alignment=alignment)
        assert slot.offset % alignment == 0
    slots = table.ordered()
    assert all(slot.end <= following.offset for slot, following in itertools.pairwise(slots))
    assert table.used_bytes == slots[-1].end == size


def test_a_place_that_cannot_be_is_refused_and_changes_nothing() -> None:
    table = SlotTable("weights", 1024)
    table.place("q", (8, 8), torch.float32, offset=256, alignment=8)
    before = table.ordered()
    for arguments, message in (
        (("q", (1,), torch.uint8, 0), "of this name already: `q`"),
        (("k", (65,), torch.float32, 0), "`k` overlaps another tensor of `weights`: `q`"),
        (("k", (1,), torch.float32, 504), "`k` overlaps another tensor of `weights`: `q`"),
        (("k", (300,), torch.float32, 512), "`k` ends at byte 1712 of `weights`, which has: 1024"),
        (("k", (1,), torch.float32, 4), "cannot lie at offset: 4"),
        (("k", (1,), torch.float32, -8), "cannot lie at offset: -8"),
        (("k", (0,), torch.float32, 0), "`k` of 0 bytes cannot lie at offset: 0"),
    ):
        name, shape, dtype, offset = arguments
        with pytest.raises(ValueError, match=message):
            table.place(name, shape, dtype, offset=offset, alignment=8)
        assert table.ordered() == before
    with pytest.raises(ValueError, match="`weights` has no tensor: `k`"):
        table.get("k")
