"""One order of collectives per training group: the leader decides, the others follow (section 1 of the design).

Two ranks that pick tasks on their own could start the collectives of two groups in different orders and wait for
each other for ever. So rank 0 of the training group broadcasts each decision, skips included, over a CPU group.
"""

from __future__ import annotations

import time
from enum import IntEnum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rollplex_cli.core.names import TaskKey, TaskKind

if TYPE_CHECKING:
    from collections.abc import Callable

_KINDS = tuple(TaskKind)


class Action(IntEnum):
    """What a decision says."""

    RUN = 0
    SKIP_GROUP = 1
    END = 2


class OrderChannel:
    """Broadcasts the leader's decisions to its training group.

    Args:
        group: a gloo process group of the training group's ranks, used for nothing else.
        leader: global rank of the leader.
        poll_s: how often a follower looks for a decision; it stays interruptible, unlike a blocking broadcast.
    """

    def __init__(self, group: dist.ProcessGroup, leader: int, poll_s: float = 0.0005) -> None:
        self._group = group
        self._leader = leader
        self._poll_s = poll_s
        self.is_leader = dist.get_rank() == leader

    def exchange(self, action: Action, key: TaskKey | None, check: Callable[[], None]) -> tuple[Action, TaskKey | None]:
        """Send (leader) or receive (followers, whose arguments are ignored) one decision.

        Raises whatever `check` raises while waiting.
        """
        kind, task_group = (_KINDS.index(key.kind), key.group) if key is not None else (-1, -1)
        message = torch.tensor([int(action), kind, task_group], dtype=torch.int64)
        work = dist.broadcast(message, src=self._leader, group=self._group, async_op=True)
        while not work.is_completed():
            check()
            time.sleep(self._poll_s)
        work.wait()  # raises if the transport failed
        sent, kind_index, sent_group = message.tolist()
        return Action(sent), TaskKey(_KINDS[kind_index], sent_group) if kind_index >= 0 else None
