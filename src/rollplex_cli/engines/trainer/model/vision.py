"""The vision tower: patches to one embedding per merged patch.

Every block attends within equal-sized chunks, so chunks are a batch axis: windows where the family has them, and one
frame (temporal grid step) in the full-attention blocks, which is what the Hugging Face tower does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from rollplex_cli.engines.trainer.model.flash import Bounds, bounds_of, flash_runs, supported
from rollplex_cli.engines.trainer.model.primitives import (
    Angles,
    compute_dtype,
    inverse_frequencies,
    rotary,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex_cli.engines.trainer.model.parameters import ModelWeights, VisionBlockWeights, VisionSizes

Grid = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Consecutive runs of rows that attend among themselves, grouped by length."""

    groups: tuple[tuple[int, int, torch.Tensor | None], ...]
    """(number of runs, rows per run, row indices [runs * rows] or None for all rows in order)."""
    inverse: torch.Tensor | None
    """Puts the concatenated groups back in row order; None where there is one group."""
    bounds: Bounds | None = None
    """The same runs for the kernel that takes runs of different lengths at once, where the device has it."""


class TableCells(NamedTuple):
    """How the learned table of positions becomes positions of patches: bilinear, once per distinct size of frame."""

    corners: torch.Tensor
    """[4, cells] int64: cells of the table around each patch of each distinct frame."""
    shares: torch.Tensor
    """[4, cells, 1]: their weights."""
    rows: torch.Tensor
    """[N] int64: which of them each patch takes."""


class Encoded(NamedTuple):
    """What the tower yields, each [N / merge^2, text hidden]."""

    rows: torch.Tensor
    """In place of the placeholders' embeddings."""
    deepstack: tuple[torch.Tensor, ...] = ()
    """Added at the placeholders behind decoder layers 0, 1, ..."""

    @classmethod
    def of_columns(cls, columns: torch.Tensor, hidden_size: int) -> Encoded:
        """From [N / merge^2, text hidden * (1 + features)], as the rollout's tower yields it."""
        rows, *deepstack = columns.split(hidden_size, dim=1)
        return cls(rows, tuple(deepstack))

    def split(self, lengths: Sequence[int]) -> list[Encoded]:
        """Of prompts with so many rows each, end to end."""
        deepstack = zip(*(torch.split_with_sizes(t, lengths) for t in self.deepstack), strict=True)
        rows = torch.split_with_sizes(self.rows, lengths)
        features = list(deepstack) or [()] * len(lengths)
        return [Encoded(own, tuple(theirs)) for own, theirs in zip(rows, features, strict=True)]

    @property
    def boundary_bytes(self) -> int:
        """Size of all of it."""
        return sum(t.numel() * t.element_size() for t in (self.rows, *self.deepstack))


@dataclass(frozen=True, slots=True)
class VisionLayout:
    """Everything about a list of grids that does not depend on weights. Rows are patches in window order."""

    angles: Angles
    """[N, 1, head_dim]."""
    order: torch.Tensor | None
    """Merged-patch permutation into window order, [N / merge^2] int64; None for the identity."""
    restore: torch.Tensor | None
    windows: Chunks | None
    """None for a tower without windows."""
    frames: Chunks
    table: TableCells | None = None


@lru_cache(maxsize=64)
def vision_layout(
    grids: tuple[Grid, ...], sizes: VisionSizes, dtype: torch.dtype, device: torch.device
) -> VisionLayout:
    """Layout of media with these grids (in patches), in order of appearance."""
    order, window_lengths = _window_order(grids, sizes) if sizes.window else (None, [])
    positions = torch.cat([_patch_positions(grid, sizes.merge) for grid in grids])
    unit = sizes.merge**2
    if order is not None and bool((order == torch.arange(len(order))).all()):
        order = None
    if order is not None:
        positions = positions.view(-1, unit, 2)[order].view(-1, 2)
    positions = positions.to(device)
    frequencies = inverse_frequencies(sizes.head_dim // 2, 10000.0, dtype, device)
    angles = (positions.unsqueeze(-1).to(compute_dtype(dtype)) * frequencies).flatten(1)
    frame_lengths = [h * w for t, h, w in grids for _ in range(t)]
    return VisionLayout(
        angles=Angles.of(angles),
        order=None if order is None else order.to(device),
        restore=None if order is None else torch.argsort(order).to(device),
        windows=_chunks([n * unit for n in window_lengths], dtype, device) if sizes.window else None,
        frames=_chunks(frame_lengths, dtype, device),
        table=_table_cells(grids, sizes.table_side, sizes.merge, dtype, device) if sizes.table_side else None,
    )


def _table_cells(
    grids: tuple[Grid, ...], side: int, merge: int, dtype: torch.dtype, device: torch.device
) -> TableCells:
    """A frame of h x w patches is stretched over the table, corners on corners; fractions are those of float32, as
    in the Hugging Face tower."""
    starts: dict[tuple[int, int], int] = {}
    corners, shares, rows, cells = [], [], [], 0
    for t, h, w in grids:
        if (h, w) not in starts:
            starts[h, w], cells = cells, cells + h * w
            places = _patch_positions((1, h, w), merge).unbind(1)
            exact = [torch.linspace(0, side - 1, n)[place] for n, place in zip((h, w), places, strict=True)]
            low = [x.long() for x in exact]
            high = [(x + 1).clamp(max=side - 1) for x in low]
            (y, x), (y0, x0), (y1, x1) = [e - i for e, i in zip(exact, low, strict=True)], low, high
            corners.append(torch.stack([y0 * side + x0, y0 * side + x1, y1 * side + x0, y1 * side + x1]))
            shares.append(torch.stack([(1 - y) * (1 - x), (1 - y) * x, y * (1 - x), y * x]))
        rows.append((torch.arange(h * w) + starts[h, w]).repeat(t))
    return TableCells(
        torch.cat(corners, dim=1).to(device),
        torch.cat(shares, dim=1).unsqueeze(-1).to(device, compute_dtype(dtype)),
        torch.cat(rows).to(device),
    )


def _patch_positions(grid: Grid, merge: int) -> torch.Tensor:
    """[t * h * w, 2] row and column of each patch in the processor's order: merge blocks are contiguous."""
    t, h, w = grid
    cells = torch.stack(torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"), dim=-1)
    blocks = cells.view(h // merge, merge, w // merge, merge, 2).transpose(1, 2)
    return blocks.reshape(-1, 2).repeat(t, 1)


def _window_order(grids: tuple[Grid, ...], sizes: VisionSizes) -> tuple[torch.Tensor, list[int]]:
    """Merged patches sorted frame by frame into windows, and the merged patches per window."""
    assert sizes.window is not None
    side = sizes.window // sizes.merge // sizes.patch
    orders: list[torch.Tensor] = []
    lengths: list[int] = []
    base = 0
    for t, h, w in grids:
        rows, columns = h // sizes.merge, w // sizes.merge
        index = torch.arange(rows * columns).view(rows, columns)
        windows = [
            index[top : top + side, left : left + side].reshape(-1)
            for top in range(0, rows, side)
            for left in range(0, columns, side)
        ]
        frame = torch.cat(windows)
        for step in range(t):
            orders.append(frame + base + step * rows * columns)
            lengths += [len(window) for window in windows]
        base += t * rows * columns
    return torch.cat(orders), lengths


def _chunks(lengths: Sequence[int], dtype: torch.dtype, device: torch.device) -> Chunks:
    if supported(device, dtype):
        return Chunks((), None, bounds_of(lengths, lengths, device))
    distinct = sorted(set(lengths))
    if len(distinct) == 1:
        return Chunks(((len(lengths), distinct[0], None),), None)
    starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
    groups = []
    for length in distinct:
        mine = starts[torch.tensor([n == length for n in lengths])]
        rows = (mine.unsqueeze(1) + torch.arange(length)).reshape(-1)
        groups.append((len(mine), length, rows.to(device)))
    inverse = torch.argsort(torch.cat([rows for _, _, rows in groups]))
    return Chunks(tuple(groups), inverse)


def patch_embed(weights: ModelWeights, patches: torch.Tensor, layout: VisionLayout) -> torch.Tensor:
    """[N, patch elements] -> [N, hidden] in window order. The stride of the convolution equals its kernel, so it
    is a matrix product, several times faster as one on a CPU."""
    vision = weights.vision
    hidden = F.linear(patches.to(vision.patch.dtype), vision.patch.view(len(vision.patch), -1), vision.patch_bias)
    if vision.positions is not None and layout.table is not None:
        around = vision.positions(layout.table.corners).to(layout.table.shares.dtype)
        stretched = (around * layout.table.shares).sum(0).to(hidden.dtype)
        hidden = hidden + stretched[layout.table.rows]
    if layout.order is None:
        return hidden
    unit = weights.vision_sizes.merge**2
    return hidden.view(-1, unit, hidden.shape[-1])[layout.order].view(hidden.shape)


def vision_block(weights: ModelWeights, index: int, hidden: torch.Tensor, layout: VisionLayout) -> torch.Tensor:
    """Block `index`: [N, hidden] -> [N, hidden]."""
    block, sizes = weights.vision.blocks[index], weights.vision_sizes
    chunks = layout.frames if layout.windows is None or index in sizes.full_attention_blocks else layout.windows
    hidden = hidden + _block_attention(block, sizes, block.norm1(hidden), layout, chunks)
    return hidden + block.mlp(block.norm2(hidden))


def _block_attention(
    block: VisionBlockWeights, sizes: VisionSizes, x: torch.Tensor, layout: VisionLayout, chunks: Chunks
) -> torch.Tensor:
    heads = sizes.num_heads
    q, k, v = rotary(block.qkv(x), layout.angles, (heads, heads, heads))
    if chunks.bounds is not None:
        return block.output(flash_runs(q, k, v, chunks.bounds).flatten(1))
    outs = []
    for runs, length, index in chunks.groups:
        shape = (runs, length, heads, sizes.head_dim)
        parts = [t if index is None else t[index] for t in (q, k, v)]
        chunk_q, chunk_k, chunk_v = (t.reshape(shape).transpose(1, 2) for t in parts)
        out = F.scaled_dot_product_attention(chunk_q, chunk_k, chunk_v)
        outs.append(out.transpose(1, 2).reshape(runs * length, -1))
    merged = outs[0] if chunks.inverse is None else torch.cat(outs)[chunks.inverse]
    return block.output(merged)


def merge_patches(weights: ModelWeights, hidden: torch.Tensor, layout: VisionLayout) -> torch.Tensor:
    """The projector: [N, hidden] in window order -> [N / merge^2, text hidden] in the processor's order."""
    out = weights.vision.merger(hidden)
    return out if layout.restore is None else out[layout.restore]


def encode(weights: ModelWeights, patches: torch.Tensor, grids: tuple[Grid, ...]) -> Encoded:
    """The whole tower: from patches [N, patch elements]."""
    layout = vision_layout(grids, weights.vision_sizes, weights.dtype, weights.device)
    hidden = patch_embed(weights, patches, layout)
    deepstack = []
    for index in range(len(weights.vision.blocks)):
        hidden = vision_block(weights, index, hidden, layout)
        if index in weights.vision.deepstack:
            deepstack.append(weights.vision.deepstack[index](hidden))
    return Encoded(merge_patches(weights, hidden, layout), tuple(deepstack))
