"""Every process group of a run but the rollout engine's own, built in one place, in one order on every rank.

The rollout engine builds its tensor-parallel groups from `Topology.rollout_tp_groups` when it is constructed, right
after these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    import datetime

    from rollplex_cli.plan.topology import Groups, RankPlace, Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """This rank's member of every list of the topology; None where a list has nothing to join."""

    train: dist.ProcessGroup | None
    """Tensor parallelism of the trainer: its activations and gradients."""
    key_values: dist.ProcessGroup | None
    """Ranks that train the same key/value heads."""
    data: dist.ProcessGroup | None
    """Ranks that train the same shard; None is all ranks."""
    exchange: dist.ProcessGroup | None
    """Ranks that hold the same rollout shard in one training group."""
    order: dist.ProcessGroup | None
    """The team (the training group, and ranks that only decode for it) on the host, for the leader's decisions."""
    responses: dist.ProcessGroup | None
    """The team on the host, for responses."""
    deliveries: tuple[dist.ProcessGroup, ...] = ()
    """Of ranks with one role: the updated weights' ways. One on a training rank; on a rollout rank one for each
    training shard in its rollout shard, in their order."""


def build_groups(
    topology: Topology, place: RankPlace, num_kv_heads: int, timeout: datetime.timedelta | None
) -> ProcessGroups:
    """Create the groups. A collective of the default group; what is created depends on the topology alone."""

    def mine(lists: Groups, *, wanted: bool, host: bool = False) -> dist.ProcessGroup | None:
        own = None
        for ranks in lists if wanted else ():
            group = dist.new_group(list(ranks), backend="gloo" if host else None, timeout=timeout)
            if place.rank in ranks:
                own = group
        return own

    several = topology.train_tp > 1
    exchanged = topology.replicas_per_group > 1
    apart = topology.disaggregated
    return ProcessGroups(
        train=mine(topology.train_tp_groups, wanted=several),
        key_values=mine(topology.kv_groups(num_kv_heads), wanted=several),
        data=mine(topology.data_parallel_groups, wanted=several or apart),
        exchange=mine(topology.exchange_groups, wanted=exchanged),
        order=mine(topology.team_groups, wanted=several or apart, host=True),
        responses=mine(topology.team_groups, wanted=exchanged or apart, host=True),
        deliveries=tuple(
            group for ranks in topology.delivery_groups if (group := mine((ranks,), wanted=True)) is not None
        ),
    )
