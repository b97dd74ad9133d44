"""After an update, where rollout and training have ranks of their own: training shards to the ranks that decode.

Every training rank broadcasts what it trains to the rollout ranks whose shard holds it. What is sent is contiguous:
the whole parameter where it lies so on both sides, else blocks of rows through a staging buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rollplex_cli.engines.weights.staged import staged, whole
from rollplex_cli.engines.weights.views import view_of
from rollplex_cli.plan.weights import STAGING_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rollplex_cli.engines.weights.shards import Placement, ShardPlan


class Delivery:
    """The ways of a rank's weights. `run` is a collective of each of `groups`, in their order.

    Args:
        plans: a training rank's own; on a rollout rank those of the training shards in its rollout shard, in order.
            Parameters have the same names and shapes in the plans of both ends.
        homes: the rank's weights by rollout name: sent from on a training rank, written on a rollout rank.
        groups: one per plan; the rank that trains the shard is the first of its group.
        sends: whether this rank trains.
    """

    def __init__(
        self, plans: Sequence[ShardPlan], homes: Mapping[str, torch.Tensor], groups: Sequence[dist.ProcessGroup],
        *, sends: bool,
    ) -> None:  # fmt: skip
        if len(plans) != len(groups):
            raise ValueError(f"{len(plans)} training shards need as many groups, got: {len(groups)}")
        self._ways = list(zip(plans, groups, strict=True))
        self._homes, self._sends = homes, sends

    @torch.no_grad()
    def run(self) -> None:
        """Bring the rollout ranks up to date."""
        for plan, group in self._ways:
            for placement in plan.placements.values():
                for block in _blocks(placement, view_of(self._homes[placement.home], placement)):
                    self._broadcast(block, group)

    def _broadcast(self, block: torch.Tensor, group: dist.ProcessGroup) -> None:
        if self._sends:
            dist.broadcast(whole(staged(block)), group=group, group_src=0)
        elif block.is_contiguous():
            dist.broadcast(whole(block), group=group, group_src=0)
        else:
            arrived = torch.empty(block.shape, dtype=block.dtype, device=block.device)
            dist.broadcast(whole(arrived), group=group, group_src=0)
            block.copy_(arrived)


def _blocks(placement: Placement, view: torch.Tensor) -> Iterator[torch.Tensor]:
    """What is sent at a time, the same at both ends: column ranges, which one of them may hold strided, in blocks of
    rows of at most `STAGING_BYTES`."""
    if placement.split != "columns":
        yield view
        return
    yield from view.split(max(1, STAGING_BYTES // (view[0].numel() * view.element_size())))
