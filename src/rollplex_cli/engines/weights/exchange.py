"""After an update: the ranks that hold one rollout shard bring one another the parts they trained.

With q = train degree / rollout degree, q ranks hold the same rollout shard and each has rewritten its own training
shard inside it. Row ranges are gathered in place: the parts of the q ranks lie next to each other in rank order.
Column ranges are staged, a block of rows at a time. Nothing is sent where nothing differs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from rollplex_cli.engines.weights.staged import staged, whole
from rollplex_cli.plan.weights import STAGING_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from rollplex_cli.engines.weights.shards import HomePart, ShardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One part of one rollout tensor."""

    home: str
    how: Literal["rows", "shared_rows", "columns"]
    first_row: int
    rows: int
    sharers: int = 1
    """Ranks in a row that hold the same rows (`shared_rows`)."""


def plan_transfers(plan: ShardPlan) -> tuple[Transfer, ...]:
    """What must be gathered, in an order that is the same on every rank of an exchange group. Pure."""
    if plan.replicas == 1:
        return ()
    found = (_transfer(plan, home, part) for home, parts in plan.homes.items() for part in parts)
    return tuple(transfer for transfer in found if transfer is not None)


def _transfer(plan: ShardPlan, home: str, part: HomePart) -> Transfer | None:
    if part.split == "replicated":
        return None
    how: Literal["rows", "shared_rows", "columns"] = "columns" if part.split == "columns" else "rows"
    sharers = 1
    if part.split == "kv_rows" and plan.train_tp > plan.shape.num_kv_heads:
        sharers = min(plan.train_tp // plan.shape.num_kv_heads, plan.replicas)
        if sharers == plan.replicas:
            return None  # all of them train these very rows and have made the same update
        how = "shared_rows"
    return Transfer(home=home, how=how, first_row=part.first_row, rows=part.rows, sharers=sharers)


def foreign_rows(plan: ShardPlan) -> dict[str, list[tuple[int, int]]]:
    """Runs of rows (first, count) of each rollout tensor that other ranks train and every publish rewrites."""
    found: dict[str, list[tuple[int, int]]] = {}
    for transfer in plan_transfers(plan):
        if transfer.how == "rows":
            chunk = transfer.rows // plan.replicas
            others = (replica for replica in range(plan.replicas) if replica != plan.replica)
            runs = [(transfer.first_row + replica * chunk, chunk) for replica in others]
            found.setdefault(transfer.home, []).extend(runs)
    return found


class Exchange:
    """The exchange group of a rank. `run` is a collective of the group.

    Args:
        plan: the rank's plan.
        rollout_params: the rollout engine's tensors, rewritten in place.
        group: the q ranks of the same rollout shard, in replica order; None where q is 1.
        trained: names of the parameters under training; tensors without any are never sent. None takes all.
        skip: tests leave out transfers with it; nothing else may.
    """

    def __init__(
        self,
        plan: ShardPlan,
        rollout_params: Mapping[str, torch.Tensor],
        group: dist.ProcessGroup | None,
        *,
        trained: Collection[str] | None = None,
        skip: Callable[[Transfer], bool] = lambda _transfer: False,
    ) -> None:
        self._replicas, self._replica, self._group = plan.replicas, plan.replica, group
        self._homes = {name: rollout_params[name] for name in plan.homes}
        written = {p.home for name, p in plan.placements.items() if trained is None or name in trained}
        self.transfers = tuple(t for t in plan_transfers(plan) if t.home in written and not skip(t))
        if self.transfers and (group is None or dist.get_world_size(group) != plan.replicas):
            raise ValueError(f"the exchange group needs {plan.replicas} ranks")

    @property
    def received_bytes(self) -> int:
        """Bytes that one `run` brings to this rank."""
        size = 0
        for transfer in self.transfers:
            home = self._homes[transfer.home]
            elements = transfer.rows * home[0].numel()
            size += elements * home.element_size() * (self._replicas - 1) // self._replicas
        return size

    @torch.no_grad()
    def run(self) -> None:
        """Bring this rollout shard up to date."""
        for transfer in self.transfers:
            part = self._homes[transfer.home][transfer.first_row : transfer.first_row + transfer.rows]
            if transfer.how == "rows":
                chunk = transfer.rows // self._replicas
                own = part[self._replica * chunk : (self._replica + 1) * chunk]
                dist.all_gather_into_tensor(whole(part), whole(own), group=self._group)
            elif transfer.how == "shared_rows":
                self._gather_shared(part, transfer.sharers)
            else:
                self._gather_columns(part)

    def _gather_shared(self, part: torch.Tensor, sharers: int) -> None:
        """The first of each run of `sharers` ranks gives the rows that the run holds."""
        distinct = self._replicas // sharers
        chunk = part.shape[0] // distinct
        mine = self._replica // sharers
        own = part[mine * chunk : (mine + 1) * chunk]
        everyone = own.new_empty((self._replicas, *own.shape))
        dist.all_gather_into_tensor(whole(everyone.view(-1)), whole(own.reshape(-1)), group=self._group)
        part.view(distinct, chunk, *part.shape[1:]).copy_(everyone[::sharers])

    def _gather_columns(self, part: torch.Tensor) -> None:
        width = part.shape[1] // self._replicas
        block = max(1, STAGING_BYTES // (part.shape[1] * part.element_size()))
        for rows in part.split(block):
            own = staged(rows[:, self._replica * width : (self._replica + 1) * width])
            everyone = own.new_empty((self._replicas, *own.shape))
            dist.all_gather_into_tensor(whole(everyone.view(-1)), whole(own.view(-1)), group=self._group)
            for replica in range(self._replicas):
                if replica != self._replica:
                    rows[:, replica * width : (replica + 1) * width].copy_(everyone[replica])
