"""What the ranks of a training group owe one another at an update: equal gradients where they hold equal
parameters, and one norm over all shards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rollplex_cli.engines.collectives import name_of
from rollplex_cli.engines.trainer.arena import ALIGNMENT
from rollplex_cli.engines.trainer.model.parallel import SINGLE, TensorParallel
from rollplex_cli.engines.weights.names import is_adapter, is_head_norm
from rollplex_cli.engines.weights.staged import whole

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex_cli.engines.collectives import GroupName
    from rollplex_cli.engines.trainer.arena import GradientArena, Slot
    from rollplex_cli.engines.weights.shards import ShardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A rank's share of the trained parameters and whom it shares what with.

    `kv_group` holds the ranks that train the same key/value heads; None where each has heads of its own.
    """

    plan: ShardPlan
    parallel: TensorParallel = SINGLE
    kv_group: dist.ProcessGroup | None = None


class GradientSync:
    """Called once per update by every rank of a training group, after the data-parallel reduction.

    A rank sees the gradient of a key/value head from its own query heads only, so ranks that share a head add theirs
    up. Gradients of replicated parameters are whole on every rank and equal but for kernels that add in no fixed
    order; their mean keeps the copies from drifting apart. Adapter factors and weights of head norms held whole on
    every rank are the exception: each rank sees what went through its own part of the other factor, or its own heads,
    so theirs are added up.
    """

    def __init__(self, shard: Shard, arena: GradientArena) -> None:
        self._shard, self._arena = shard, arena
        slots = {slot.name: slot for slot in arena.layout.slots}
        # What is frozen has no gradients.
        placements = {name: p for name, p in shard.plan.placements.items() if name in slots}
        replicated = [n for n, p in placements.items() if p.split == "replicated"]
        self._replicated = [slots[n] for n in replicated if not _is_partial(n)]
        self._partial = [slots[n] for n in replicated if _is_partial(n)]
        self._shared = [slots[n] for n, p in placements.items() if p.split == "kv_rows" and p.sharers > 1]
        if self._shared and shard.kv_group is None:
            raise ValueError("ranks share key/value heads: the shard needs their group")
        self._counted = _runs([slots[n] for n, p in placements.items() if p.primary])

    def synchronize(self) -> None:
        """Make gradients of shared and of replicated parameters equal on the ranks that hold them."""
        parallel = self._shard.parallel
        if parallel.size == 1:
            return
        self._reduce(self._shared, self._shard.kv_group, name_of("key/value group", self._shard.kv_group), 1.0)
        self._reduce(self._replicated, parallel.group, parallel.name, 1.0 / parallel.size)
        self._reduce(self._partial, parallel.group, parallel.name, 1.0)

    def norm(self) -> float:
        """Global L2 norm over the training group, each parameter counted once; equal on all its ranks."""
        if self._shard.parallel.size == 1:
            return self._arena.norm()
        total = self._arena.square_sum(self._counted)
        return math.sqrt(float(self._shard.parallel.sum(total)))

    def _reduce(self, slots: Sequence[Slot], group: dist.ProcessGroup | None, name: GroupName, factor: float) -> None:
        if not slots:
            return
        views = [self._arena.layout.view(self._arena.flat, slot).view(-1) for slot in slots]
        joined = torch.cat(views)
        with self._shard.parallel.log.launch("all_reduce", name, joined.nbytes):
            dist.all_reduce(whole(joined), group=group)
        if factor != 1.0:
            joined *= factor
        for view, value in zip(views, joined.split([len(v) for v in views]), strict=True):
            view.copy_(value)


def _is_partial(name: str) -> bool:
    """Whether a rank sees its own part of a replicated parameter's gradient only."""
    return is_adapter(name) or is_head_norm(name)


def _runs(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """(start, stop) of the slots in a flat array, neighbours joined (the gaps between them hold zeros)."""
    runs: list[tuple[int, int]] = []
    ordered = sorted(slots, key=lambda slot: slot.offset)
    for slot in ordered:
        if runs and slot.offset - runs[-1][1] < ALIGNMENT:
            runs[-1] = (runs[-1][0], slot.offset + slot.numel)
        else:
            runs.append((slot.offset, slot.offset + slot.numel))
    return runs
