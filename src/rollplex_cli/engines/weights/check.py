"""The check of a publish: what the rollout decodes with is what the trainers wrote, everywhere.

Reads every byte on the host, so it is a debug switch of a run and always on in tests.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.engines.weights.rounding import rounded
from rollplex_cli.engines.weights.staged import staged
from rollplex_cli.engines.weights.views import view_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rollplex_cli.engines.weights.shards import Box, ShardPlan

MAX_NAMED = 6


def check_published(
    plans: Sequence[ShardPlan],
    rollout_params: Mapping[str, torch.Tensor],
    masters_of: Callable[[str], Iterable[tuple[Box, torch.Tensor]]] | None,
    group: dist.ProcessGroup | None,
) -> None:
    """Compare the weights of all ranks after a publish. A collective of `group` (all ranks that hold weights).

    Three statements, which together say that every shard holds the bytes its owner wrote: a rank's parameters are its
    masters rounded to their type; ranks with the same rollout shard hold the same bytes; ranks that hold the same part
    of a tensor (replicated, shared key/value heads, data parallel, decoded with elsewhere) have the same values.

    Args:
        plans: of the training shards looked at in `rollout_params`: a training rank's own, or all that lie in the
            rollout shard of a rank that only decodes.
        masters_of: boxes of a parameter with their masters: those that this rank holds, none for a frozen one; None
            where the rank does not train.

    Raises:
        RunFailedError: on every rank, naming tensors and ranks.
    """
    held = [(name, view_of(rollout_params[p.home], p), p) for plan in plans for name, p in plan.placements.items()]
    faults = [
        f"`{name}` is not what its master says"
        for name, view, _ in held
        if masters_of is not None and not _equals_masters(view, masters_of(name))
    ]
    first = plans[0]
    own = {
        "faults": faults,
        "homes": {
            f"{name}@{first.rollout_shard}/{first.rollout_tp}": _digest(rollout_params[name]) for name in first.homes
        },
        "trained": {f"{p.tensor}@{p.box.offset}+{p.box.shape}": _digest(view) for _, view, p in held},
    }
    ranks: list[dict[str, Any]] = [own]
    if dist.get_world_size(group) > 1:
        ranks = [{} for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(ranks, own, group=group)
    found = [f"rank {rank}: {fault}" for rank, theirs in enumerate(ranks) for fault in theirs["faults"]]
    found += _different("homes", ranks, "rollout shard") + _different("trained", ranks, "trained part")
    if found:
        more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        raise RunFailedError(f"published weights are wrong: {'; '.join(found[:MAX_NAMED])}{more}")


def _different(kind: str, ranks: list[dict[str, Any]], what: str) -> list[str]:
    first: dict[str, tuple[int, str]] = {}
    found = []
    for rank, theirs in enumerate(ranks):
        for key, digest in theirs[kind].items():
            other, expected = first.setdefault(key, (rank, digest))
            if digest != expected:
                found.append(f"ranks {other} and {rank} differ in {what} `{key}`")
    return found


def _equals_masters(view: torch.Tensor, masters: Iterable[tuple[Box, torch.Tensor]]) -> bool:
    return all(
        torch.equal(view.detach()[box.slices()].cpu(), rounded(master, view.dtype).cpu()) for box, master in masters
    )


def _digest(tensor: torch.Tensor) -> str:
    data = staged(tensor).cpu().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.data, digest_size=16).hexdigest()
