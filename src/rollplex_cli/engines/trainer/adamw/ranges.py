"""Which elements of the flat arrays a data-parallel rank owns, and the chunks it updates them in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from rollplex_cli.engines.trainer.arena import ALIGNMENT

if TYPE_CHECKING:
    from rollplex_cli.engines.trainer.arena import FlatLayout


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Ranks that train the same parameters and share out their optimizer state."""

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None


SINGLE_RANK = DataParallel()


def data_parallel_of(group: dist.ProcessGroup | None) -> DataParallel:
    """This rank's place in a group, or among all ranks if None."""
    group = group or dist.group.WORLD
    return DataParallel(dist.get_world_size(group), dist.get_rank(group), group)


class Chunk(NamedTuple):
    """Elements [start, stop) of the flat arrays, all with the same weight decay."""

    start: int
    stop: int
    decays: bool


def owned_range(size: int, ranks: int, rank: int) -> tuple[int, int]:
    """[start, stop) of `size` elements that `rank` of `ranks` owns: equal shares of whole `ALIGNMENT` units, in order
    of rank; the last ones may have less, or nothing."""
    units = -(-size // ALIGNMENT)
    share = -(-units // ranks) * ALIGNMENT
    return min(rank * share, size), min((rank + 1) * share, size)


def cut(layout: FlatLayout, start: int, stop: int, chunk_elements: int) -> list[Chunk]:
    """The chunks of [start, stop): none crosses the border between parameters with and without weight decay."""
    chunks = []
    for low, high, decays in ((0, layout.decay_end, True), (layout.decay_end, layout.size, False)):
        first, end = max(low, start), min(high, stop)
        chunks += [Chunk(at, min(at + chunk_elements, end), decays) for at in range(first, end, chunk_elements)]
    return chunks
