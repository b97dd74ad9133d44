"""Which rank does what. All ranks build the same group lists in the same order, or their creation deadlocks."""

from __future__ import annotations

from dataclasses import dataclass

from rollplex_cli.core.errors import UsageError
from rollplex_cli.plan.model import ModelShape

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """A rank's place in both engines.

    With q = train_tp / rollout_tp, rollout shard i of replica b is training shard q * i + b. Where rollout and training
    have ranks of their own, a rank has one half of this: it trains the training shard, or decodes with the rollout
    shard.
    """

    rank: int
    node: int
    local_rank: int
    training_group: int
    """Data-parallel index, 0 .. data_parallel - 1."""
    training_shard: int
    replica: int
    """Rollout replica within the training group, 0 .. q - 1."""
    rollout_shard: int
    trains: bool = True
    """Whether the rank holds a trainer."""
    decodes: bool = True
    """Whether the rank holds a rollout engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Degrees, every rank's place, and the process groups to create, in this order.

    `disaggregated`: the first half of the ranks trains, the second half decodes. Rank n / 2 + x then holds the
    rollout that rank x of n / 2 co-located ranks would have beside its trainer.
    """

    num_nodes: int
    ranks_per_node: int
    train_tp: int
    rollout_tp: int
    places: tuple[RankPlace, ...]
    train_tp_groups: Groups
    data_parallel_groups: Groups
    rollout_tp_groups: Groups
    exchange_groups: Groups
    """Ranks that hold the same rollout shard in the replicas of one training group; empty where training ranks hold
    nothing but their training shard."""
    disaggregated: bool = False

    @property
    def num_ranks(self) -> int:
        """World size."""
        return self.num_nodes * self.ranks_per_node

    @property
    def num_training_ranks(self) -> int:
        """Ranks with a trainer: ranks 0 .. this - 1."""
        return self.num_ranks // 2 if self.disaggregated else self.num_ranks

    @property
    def data_parallel(self) -> int:
        """Number of training groups."""
        return self.num_training_ranks // self.train_tp

    @property
    def replicas_per_group(self) -> int:
        """q, rollout replicas within one training group."""
        return self.train_tp // self.rollout_tp

    def kv_groups(self, num_kv_heads: int) -> Groups:
        """Ranks that train the same key/value heads, where they outnumber them; empty where every rank has its own."""
        if self.train_tp <= num_kv_heads:
            return ()
        sharers = self.train_tp // num_kv_heads
        return tuple(tuple(range(start, start + sharers)) for start in range(0, self.num_training_ranks, sharers))

    @property
    def team_groups(self) -> Groups:
        """Every training group with the ranks that decode for it, its leader first."""
        if not self.disaggregated:
            return self.train_tp_groups
        half = self.num_training_ranks
        return tuple((*ranks, *(half + rank for rank in ranks)) for ranks in self.train_tp_groups)

    @property
    def delivery_groups(self) -> Groups:
        """Where rollout and training have ranks of their own: every training rank, followed by the rollout ranks
        whose shard holds what it trains, in replica order. Empty otherwise."""
        if not self.disaggregated:
            return ()
        half, q = self.num_training_ranks, self.replicas_per_group
        return tuple((p.rank, *(half + p.rank - p.replica + b for b in range(q))) for p in self.places if p.trains)


def build_topology(
    num_nodes: int, ranks_per_node: int, train_tp: int, rollout_tp: int, *, disaggregated: bool = False
) -> Topology:
    """Lay out ranks. Training groups are consecutive ranks, so that tensor parallelism stays inside a node.

    Raises:
        UsageError: the degrees do not divide.
    """
    ranks = num_nodes * ranks_per_node
    half, odd = divmod(ranks, 2) if disaggregated else (ranks, 0)
    if odd or half % train_tp or train_tp % rollout_tp:
        split = f"{ranks} ranks, {half} of them train" if disaggregated else f"{ranks} ranks"
        raise UsageError(
            f"degrees do not divide: num_nodes {num_nodes} x ranks_per_node {ranks_per_node} = {split}, "
            f"train_tp {train_tp}, rollout_tp {rollout_tp}",
            hint="`train_tp` divides the number of ranks that train and `rollout_tp` divides `train_tp`",
        )
    q = train_tp // rollout_tp
    places = tuple(_place(rank, ranks_per_node, train_tp, q, half, ranks) for rank in range(ranks))
    starts = range(0, half, train_tp)
    first = half if disaggregated else 0
    replicas = tuple(tuple(first + start + q * i + b for i in range(rollout_tp)) for start in starts for b in range(q))
    exchange = tuple(tuple(start + q * i + b for b in range(q)) for start in starts for i in range(rollout_tp))
    return Topology(
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        train_tp=train_tp,
        rollout_tp=rollout_tp,
        places=places,
        train_tp_groups=tuple(tuple(range(start, start + train_tp)) for start in starts),
        data_parallel_groups=tuple(tuple(range(shard, half, train_tp)) for shard in range(train_tp)),
        rollout_tp_groups=replicas,
        exchange_groups=() if disaggregated else exchange,
        disaggregated=disaggregated,
    )


def require_replicas_on_one_node(topology: Topology) -> None:
    """Of ranks that launch in one order, which they keep in memory that they share.

    Raises:
        UsageError: a rollout replica lies on several nodes.
    """
    for ranks in topology.rollout_tp_groups:
        nodes = sorted({topology.places[rank].node for rank in ranks})
        if len(nodes) > 1:
            raise UsageError(
                f"training beside a rollout of several ranks needs each rollout replica on one node: ranks "
                f"{', '.join(map(str, ranks))} are on nodes {', '.join(map(str, nodes))} (ranks_per_node "
                f"{topology.ranks_per_node}, train_tp {topology.train_tp}, rollout_tp {topology.rollout_tp})",
                hint="choose `topology.train_tp` as a divisor of `topology.ranks_per_node`, or set "
                "`topology.rollout_tp` to 1 or `schedule.name` to `colocate`",
            )


def head_faults(shape: ModelShape, train_tp: int, rollout_tp: int) -> list[str]:
    """Why a model cannot be cut this way; empty if it can. One sentence per fault, the product spelled out."""
    faults = []
    for key, degree in (("train_tp", train_tp), ("rollout_tp", rollout_tp)):
        if shape.num_heads % degree:
            faults.append(_uneven(f"{shape.name} has {shape.num_heads} attention heads", key, degree, shape.num_heads))
        if shape.num_kv_heads % degree and degree % shape.num_kv_heads:
            heads = f"{shape.name} has {shape.num_kv_heads} key/value heads"
            faults.append(_uneven(heads, key, degree, shape.num_kv_heads))
        if shape.vision_num_heads % degree:
            heads = f"{shape.name} has {shape.vision_num_heads} vision attention heads"
            faults.append(_uneven(heads, key, degree, shape.vision_num_heads))
    return faults


def _place(rank: int, ranks_per_node: int, train_tp: int, q: int, half: int, ranks: int) -> RankPlace:
    """`half`: number of training ranks; ranks from there on decode for the rank so far before them."""
    role = rank % half
    shard = role % train_tp
    return RankPlace(
        rank=rank,
        node=rank // ranks_per_node,
        local_rank=rank % ranks_per_node,
        training_group=role // train_tp,
        training_shard=shard,
        replica=shard % q,
        rollout_shard=shard // q,
        trains=rank < half,
        decodes=rank >= half or half == ranks,
    )


def _uneven(heads: str, key: str, degree: int, count: int) -> str:
    return f"{heads}, `topology.{key}` is {degree}: {count} / {degree} = {count / degree:.2f} heads a rank"
