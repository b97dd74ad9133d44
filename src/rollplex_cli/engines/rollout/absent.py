"""In place of a rollout engine on a rank that only trains. Imports no engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from rollplex_cli.engines.rollout.base import GroupRequest, GroupResult, RolloutEngine, VisionOutput

Groups = tuple[tuple[int, ...], ...]


def group_lists(replicas: Groups) -> tuple[Groups, Groups, Groups]:
    """Ranks of the process groups that a rollout engine makes, in its order: world, tensor and pipeline parallel."""
    return replicas, replicas, tuple((rank,) for ranks in replicas for rank in ranks)


def join_groups(replicas: Groups, backend: str) -> None:
    """Take part in the making of the groups of engines on other ranks; this rank is in none of them.

    Every rank of the default group must, in the same order: for each list of ranks a group on the device and one on the
    host.

    Args:
        backend: of the device.
    """
    for lists in group_lists(replicas):
        for ranks in lists:
            dist.new_group(list(ranks), backend=backend)
            dist.new_group(list(ranks), backend="gloo")


class AbsentRollout:
    """Satisfies `RolloutEngine` where nothing is ever decoded: it has the weights, a version, and no work.

    Args:
        homes: the rank's weights under the rollout's names.
        banned_token_ids: see `SglangRollout`.
    """

    def __init__(self, homes: Mapping[str, torch.Tensor], banned_token_ids: Sequence[int]) -> None:
        self._homes, self._version = dict(homes), 0
        self.banned_token_ids = tuple(banned_token_ids)

    @property
    def weight_version(self) -> int:
        """Publishes so far, as on the ranks that decode."""
        return self._version

    @property
    def num_running(self) -> int:
        """None run here."""
        return 0

    @property
    def capacity_tokens(self) -> int:
        """There is no pool."""
        return 0

    def parameters(self) -> dict[str, torch.Tensor]:
        """The rank's weights."""
        return dict(self._homes)

    def begin_step(self) -> None:
        """Nothing to reset."""

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        """Raises ValueError for any request."""
        if requests:
            raise ValueError("this rank only trains: it decodes nothing")

    def step(self) -> list[GroupResult]:
        """Nothing is ever completed here."""
        return []

    def take_vision(self) -> list[VisionOutput]:
        """None."""
        return []

    def has_work(self) -> bool:
        """Never."""
        return False

    def abort(self, groups: Sequence[int] | None = None) -> list[GroupResult]:
        """There is nothing to stop. Raises ValueError for a group."""
        if groups:
            raise ValueError(f"no such group: {list(groups)}")
        return []

    def drop_caches(self) -> None:
        """There are none."""

    def pause(self) -> None:
        """There is nothing to pause."""

    def publish(self) -> None:
        """The weights went out; nothing was computed under the old ones here."""
        self._version += 1

    def close(self) -> None:
        """Let go of the weights."""
        self._homes.clear()


if TYPE_CHECKING:
    _conforms: type[RolloutEngine] = AbsentRollout
