"""Tensor parallelism in the forward: where activations are whole, where they are partial sums, and what joins them.

Between layers every rank of a training group holds the whole hidden states, and so their whole gradients. A
column-parallel layer reads them (`enter`), a row-parallel one leaves partial sums (`leave`); each is the other's
gradient (Shoeybi et al., 2019, section 3).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rollplex_cli.engines.collectives import CollectiveLog, GroupName, unwatched
from rollplex_cli.engines.weights.shards import padded_vocab
from rollplex_cli.engines.weights.staged import whole

if TYPE_CHECKING:
    from collections.abc import Sequence

TRAINING_GROUP = GroupName("training group")


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """A rank's place in its training group. Every collective of a forward and its backward goes through here, and
    all ranks of the group make the same calls in the same order.

    `log` hears of each; `name` is what messages call the group.
    """

    size: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    log: CollectiveLog = field(default_factory=unwatched)
    name: GroupName = TRAINING_GROUP

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Whole activations into a column-parallel layer: nothing forward, gradients are summed over the group."""
        if self.size == 1 or not torch.is_grad_enabled():
            return x
        out: torch.Tensor = _Enter.apply(x, self)  # type: ignore[no-untyped-call]
        return out

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """Partial sums of a row-parallel layer to whole activations: summed over the group, nothing backward.

        In place: `x` is a temporary that nobody else reads, a backward included.
        """
        if self.size == 1:
            return x
        if not torch.is_grad_enabled():
            return self.sum_(x)
        out: torch.Tensor = _Leave.apply(x, self)  # type: ignore[no-untyped-call]
        return out

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """A new tensor: the sum of `x` over the group."""
        return self.sum_(x.detach().clone(memory_format=torch.contiguous_format))

    def sum_(self, x: torch.Tensor) -> torch.Tensor:
        """`x`, which is contiguous and takes no part in autograd, overwritten with its sum over the group."""
        return self._all_reduce(x, _SUM)

    def max_(self, x: torch.Tensor) -> torch.Tensor:
        """The same with the elementwise maximum."""
        return self._all_reduce(x, _MAX)

    def _all_reduce(self, x: torch.Tensor, options: dist.AllreduceOptions) -> torch.Tensor:
        group = self.group if self.group is not None else dist.group.WORLD
        assert group is not None
        with self.log.launch("all_reduce", self.name, x.nbytes):
            # The group's own method: what `dist.all_reduce` puts around it costs as much again, hundreds of times a
            # group of responses.
            work = group.allreduce([whole(x)], options)
            if work is not None:
                work.wait()
        return x


def _options(op: Any) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, False
    return options


_SUM, _MAX = _options(dist.ReduceOp.SUM), _options(dist.ReduceOp.MAX)

SINGLE = TensorParallel()
"""No tensor parallelism."""


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
        ctx.parallel = parallel
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.parallel.sum(grads[0]), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, parallel: TensorParallel) -> torch.Tensor:
        ctx.mark_dirty(x)
        return parallel.sum_(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


@dataclass(frozen=True, slots=True)
class VocabShard:
    """Token ids [start, start + rows) of embedding and head."""

    start: int
    rows: int

    @classmethod
    def of_rank(cls, rows: int, parallel: TensorParallel) -> VocabShard:
        """A rank's share of a table of `rows` that the rollout engine pads and cuts as it does the vocabulary."""
        per_rank = padded_vocab(rows) // parallel.size
        start = min(parallel.rank * per_rank, rows)
        return cls(start, min(per_rank, rows - start))

    def local(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(row of each token, 0 where it is elsewhere; whether it is here)."""
        rows = token_ids - self.start
        here = (rows >= 0) & (rows < self.rows)
        return rows.masked_fill(~here, 0), here

    def of(self, token_ids: Sequence[int]) -> list[int]:
        """Rows of those tokens that are here."""
        return [t - self.start for t in token_ids if self.start <= t < self.start + self.rows]


def sharded_embedding(
    token_ids: torch.Tensor, weight: torch.Tensor, shard: VocabShard, parallel: TensorParallel
) -> torch.Tensor:
    """[L] ids -> [L, hidden] from the rows that each rank holds."""
    rows, here = shard.local(token_ids)
    words = torch.nn.functional.embedding(rows, weight)
    return parallel.leave(words.masked_fill(~here.unsqueeze(-1), 0.0))


def sharded_logprobs(
    logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard, parallel: TensorParallel
) -> torch.Tensor:
    """log softmax over the whole vocabulary at `targets` [N], from this rank's columns `logits` [N, rows]."""
    out: torch.Tensor = _ShardedLogprobs.apply(logits, targets, shard, parallel)  # type: ignore[no-untyped-call]
    return out


class _ShardedLogprobs(torch.autograd.Function):
    """d logits = (one hot of the target - softmax) * d out, each rank its own columns."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, shard: VocabShard, parallel: TensorParallel
    ) -> torch.Tensor:
        shifted = logits - parallel.max_(logits.amax(dim=-1)).unsqueeze(-1)
        rows, here = shard.local(targets)
        picked = shifted.gather(1, rows.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0)
        shares = shifted.exp_()
        total, picked = parallel.sum_(torch.stack([shares.sum(dim=-1), picked])).unbind()
        shares /= total.unsqueeze(-1)
        ctx.save_for_backward(shares, rows, here)
        return picked - total.log()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        shares, rows, here = ctx.saved_tensors
        grad = grads[0]
        out = shares * -grad.unsqueeze(-1)
        out.scatter_add_(1, rows.unsqueeze(1), grad.masked_fill(~here, 0.0).unsqueeze(1))
        return out, None, None, None
