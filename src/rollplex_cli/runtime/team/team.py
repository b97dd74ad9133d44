"""A training group as one of its ranks sees it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollplex_cli.engines.collectives import name_of
from rollplex_cli.engines.trainer.model.parallel import TensorParallel
from rollplex_cli.engines.trainer.sharded import Shard
from rollplex_cli.engines.weights.check import check_published
from rollplex_cli.engines.weights.delivery import Delivery
from rollplex_cli.engines.weights.exchange import Exchange
from rollplex_cli.runtime.executor.order import OrderChannel
from rollplex_cli.runtime.team.board import DecodeBoard
from rollplex_cli.runtime.team.responses import ResponseExchange
from rollplex_cli.runtime.team.word import LeaderWord

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rollplex_cli.engines.rollout.base import GroupResult, RolloutEngine
    from rollplex_cli.engines.trainer.actor import Actor
    from rollplex_cli.engines.weights.shards import ShardPlan
    from rollplex_cli.plan.topology import RankPlace, Topology
    from rollplex_cli.runtime.control.peers import Peers
    from rollplex_cli.runtime.launches.build import Launches
    from rollplex_cli.runtime.team.groups import ProcessGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class Team:
    """This rank's place, and what it shares with its training group.

    All ranks of a training group train every prompt of the group, each its shard; its q replicas share out the
    decoding: replica b decodes the prompts b, b + q, ... Where rollout and training have ranks of their own, the team
    is the training group and the ranks of the replicas that decode for it.
    """

    topology: Topology
    place: RankPlace
    groups: ProcessGroups
    channel: OrderChannel | None
    """Order of the trainer's tasks; None where this rank trains alone."""
    board: DecodeBoard
    responses: ResponseExchange | None
    """None where every rank of the training group decodes every prompt."""
    word: LeaderWord
    """What the leader finds for all (rewards)."""
    launches: Launches
    """What the lanes launch, and in which order."""

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its training group: counts its figures and writes its responses."""
        return self.place.trains and self.place.training_shard == 0

    @property
    def speaks_for_replica(self) -> bool:
        """Whether this rank speaks for its rollout replica."""
        return self.place.decodes and self.place.rollout_shard == 0

    @property
    def replica_number(self) -> int:
        """Of this rank's replica among all of the run."""
        return self.place.training_group * self.topology.replicas_per_group + self.place.replica

    @property
    def num_replicas(self) -> int:
        """Rollout replicas of the run."""
        return self.topology.data_parallel * self.topology.replicas_per_group

    def replica_of(self, group: int) -> int:
        """Which replica of the training group decodes a local group id."""
        return group % self.topology.replicas_per_group

    def own_groups(self, groups: Iterable[int]) -> list[int]:
        """Those that this rank's replica decodes."""
        if not self.place.decodes:
            return []
        return [g for g in groups if self.replica_of(g) == self.place.replica]

    def exchange_responses(self, group: int, group_size: int, own: GroupResult | None) -> GroupResult:
        """See `ResponseExchange.run`."""
        assert self.responses is not None
        return self.responses.run(group, self.replica_of(group), group_size, own)

    def owner_of(self, group: int) -> int:
        """Global rank that speaks for the replica that decodes a local group id, and trains its training group."""
        return self.place.training_group * self.topology.train_tp + self.replica_of(group)

    def shard(self, plan: ShardPlan) -> Shard | None:
        """The trainer's share of the model; None for all of it."""
        if self.topology.train_tp == 1:
            return None
        parallel = TensorParallel(
            self.topology.train_tp, self.place.training_shard, self.groups.train,
            log=self.launches.trainer, name=name_of("training group", self.groups.train),
        )  # fmt: skip
        return Shard(plan=plan, parallel=parallel, kv_group=self.groups.key_values)


def build_team(topology: Topology, place: RankPlace, groups: ProcessGroups, peers: Peers, launches: Launches) -> Team:
    """Put a team together; lanes that talk to it get connections of their own to the store of `peers`."""
    first = place.training_group * topology.train_tp
    replicas, apart = topology.replicas_per_group, topology.disaggregated
    # Rollout shard 0 of replica b is training shard b, or decodes for it.
    owner = first + (topology.num_training_ranks if apart else 0)
    name = f"{peers.namespace}/team/{place.training_group}"
    return Team(
        topology=topology,
        place=place,
        groups=groups,
        channel=OrderChannel(groups.order, first) if groups.order is not None else None,
        board=DecodeBoard(
            peers.another_connection() if replicas > 1 or apart else None,
            name,
            place.replica if place.decodes else None,
            replicas,
            posts=place.decodes and place.rollout_shard == 0,
        ),
        responses=(
            ResponseExchange(groups.responses, range(owner, owner + replicas), launches.trainer)
            if groups.responses is not None
            else None
        ),
        word=LeaderWord(
            peers.another_connection() if topology.train_tp > 1 else None, name, leads=place.training_shard == 0
        ),
        launches=launches,
    )


class Publisher:
    """Makes the trainer's update the rollout's weights. Called from the rollout lane, on every rank together.

    Args:
        plans: of the training shards whose weights this rank holds, its own first; several on a rank that only decodes.
        params: the rollout's tensors, or what stands in for them on a rank that only trains.
        actor: None on a rank that does not train.
        check: compare all weights of all ranks afterwards (`weights.check`), which reads every byte on the host.
    """

    def __init__(
        self, team: Team, plans: Sequence[ShardPlan], params: Mapping[str, torch.Tensor], rollout: RolloutEngine,
        actor: Actor | None, *, check: bool,
    ) -> None:  # fmt: skip
        self._plans, self._params, self._rollout, self._actor, self._check = plans, params, rollout, actor, check
        self._log = team.launches.rollout
        self._name = name_of("group of equal rollout shards", team.groups.exchange)
        self._move: Exchange | Delivery
        if team.topology.disaggregated:
            self._move = Delivery(plans, params, team.groups.deliveries, sends=team.place.trains)
        else:
            # Beside adapters the weights are read in every phase and stay as they are; otherwise a publish writes all
            # rows that other ranks train: their memory may have been given back since (`exchange.foreign_rows`).
            trained = actor.named_parameters() if actor is not None and actor.trains_adapters else None
            self._move = Exchange(plans[0], params, team.groups.exchange, trained=trained)

    def publish(self) -> None:
        """Bring the weights where they are decoded with, check, and drop what the rollout computed under the old."""
        # Every trainer lane is idle: there is nothing to take turns with.
        with self._log.launch("exchange of the updated weights", self._name, on_host=True):
            self._move.run()
        if torch.cuda.is_initialized():
            # The rollout reads on a stream of its own.
            torch.cuda.current_stream().synchronize()
        if self._check:
            masters_of = self._actor.masters_of if self._actor is not None else None
            check_published(self._plans, self._params, masters_of, None)
        self._rollout.publish()
