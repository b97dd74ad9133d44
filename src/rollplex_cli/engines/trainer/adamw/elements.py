"""Runs of a flat array against the tensors they belong to, which may be strided views."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rollplex_cli.engines.weights.shards import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch

    from rollplex_cli.engines.trainer.arena import FlatLayout


def boxes(shape: tuple[int, ...], first: int, count: int) -> Iterator[Box]:
    """The boxes that together are the elements [first, first + count) of a tensor of `shape` in row-major order.

    They come in that order, and so do the elements of each. A matrix needs at most three: the rest of a row, whole
    rows, the start of a row.
    """
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    while count:
        row, column = divmod(first, inner)
        if column == 0 and count >= inner:
            rows = count // inner
            taken = rows * inner
            yield Box((row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
        else:
            taken = min(inner - column, count)
            for box in boxes(shape[1:], column, taken):
                yield Box((row, *box.offset), (1, *box.shape))
        first, count = first + taken, count - taken


def write_elements(target: torch.Tensor, first: int, values: torch.Tensor) -> None:
    """`target.flatten()[first : first + n] = values` [n], for a target with any strides."""
    for part, run in _parts(target, first, len(values)):
        part.copy_(values[run].view(part.shape))


def read_elements(source: torch.Tensor, first: int, out: torch.Tensor) -> None:
    """`out[:] = source.flatten()[first : first + n]` for out [n] and a source with any strides."""
    for part, run in _parts(source, first, len(out)):
        out[run].view(part.shape).copy_(part)


def _parts(tensor: torch.Tensor, first: int, count: int) -> Iterator[tuple[torch.Tensor, slice]]:
    if tensor.is_contiguous():
        yield tensor.view(-1)[first : first + count], slice(0, count)
        return
    done = 0
    for box in boxes(tuple(tensor.shape), first, count):
        yield tensor[box.slices()], slice(done, done + box.numel)
        done += box.numel


class ParameterViews:
    """The parameters as one flat array in a layout, wherever each of them lies."""

    def __init__(self, layout: FlatLayout, params: Mapping[str, torch.Tensor]) -> None:
        self._layout = layout
        self._params = dict(params)
        self.dtype = next(iter(self._params.values())).dtype

    def write(self, start: int, values: torch.Tensor) -> None:
        """Copy values [n] to the parameters' elements [start, start + n)."""
        for slot, low, high in self._layout.overlaps(start, start + len(values)):
            write_elements(self._params[slot.name].detach(), low - slot.offset, values[low - start : high - start])

    def read(self, start: int, out: torch.Tensor) -> None:
        """Copy the parameters' elements [start, start + n) to `out` [n]; gaps of the layout become zeros."""
        cursor = start
        for slot, low, high in self._layout.overlaps(start, start + len(out)):
            out[cursor - start : low - start].zero_()
            read_elements(self._params[slot.name].detach(), low - slot.offset, out[low - start : high - start])
            cursor = high
        out[cursor - start :].zero_()
