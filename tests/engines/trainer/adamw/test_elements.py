"""Runs of a flat array against tensors of any shape and stride."""

from __future__ import annotations

import math

import torch
from engines.trainer.adamw.small import make_params
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.engines.trainer.adamw.elements import ParameterViews, boxes, read_elements, write_elements
from rollplex_cli.engines.trainer.arena import FlatLayout


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """(shape, first, count) of a run inside a tensor."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=4)))
    size = math.prod(shape)
    first = draw(st.integers(0, size - 1))
    return shape, first, draw(st.integers(1, size - first))


@settings(deadline=None, max_examples=200)
@given(run=runs())
def test_boxes_are_the_run_in_order(run: tuple[tuple[int, ...], int, int]) -> None:
    shape, first, count = run
    numbered = torch.arange(math.prod(shape)).view(shape)
    found = list(boxes(shape, first, count))
    assert torch.cat([numbered[box.slices()].reshape(-1) for box in found]).tolist() == list(
        range(first, first + count)
    )
    assert len(found) <= max(1, 2 * len(shape) - 1)


@settings(deadline=None, max_examples=100)
@given(run=runs(), padded=st.booleans())
def test_strided_writes_touch_their_elements_only(run: tuple[tuple[int, ...], int, int], padded: bool) -> None:
    shape, first, count = run
    home = torch.full(tuple(n + 3 * padded for n in shape), -1.0)
    inside = tuple(slice(padded, padded + n) for n in shape)
    target = home[inside]
    values = torch.arange(count, dtype=torch.float32)
    write_elements(target, first, values)
    expected = torch.full((math.prod(shape),), -1.0)
    expected[first : first + count] = values
    assert target.flatten().tolist() == expected.tolist()
    assert int((home == -1).sum()) == home.numel() - count
    out = torch.empty(count)
    read_elements(target, first, out)
    assert torch.equal(out, values)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_reading_gives_what_was_written_and_zeros_in_the_gaps(data: st.DataObject) -> None:
    params = make_params(torch.bfloat16, strided=True)
    layout = FlatLayout.of(params)
    views = ParameterViews(layout, params)
    start = data.draw(st.integers(0, layout.size - 1))
    stop = data.draw(st.integers(start + 1, layout.size))
    values = torch.randn(stop - start).bfloat16()
    views.write(start, values)
    out = torch.full((layout.size,), math.nan).bfloat16()
    views.read(0, out)
    inside = torch.zeros(layout.size, dtype=torch.bool)
    for slot in layout.slots:
        inside[slot.offset : slot.offset + slot.numel] = True
        assert torch.equal(layout.view(out, slot), params[slot.name])
    assert not out[~inside].any()
    assert torch.equal(out[start:stop][inside[start:stop]], values[inside[start:stop]])
