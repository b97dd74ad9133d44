"""Which prompt groups are decoded, in an order that every rank of a training group finds for itself.

The replicas of a training group decode different prompts at different speeds. The logical order of a step is that of
(decode steps taken by the replica, replica, group id), so a group may be trained once no replica can still complete
one that comes before it: when every other replica has taken as many decode steps or has nothing left to decode.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rollplex_cli.runtime.control.peers import Store

FINISHED = 1 << 60
"""Clock of a replica that has nothing left to decode."""


class MergedOrder:
    """The order's arithmetic. Pure: no store, no clock of its own."""

    def __init__(self, replicas: int, groups: int) -> None:
        self._clocks = [0] * replicas
        self._waiting: set[tuple[int, int, int]] = set()
        self._seen: set[int] = set()
        self._left = groups

    @property
    def complete(self) -> bool:
        """Whether every group of the step was released."""
        return self._left == 0

    def add(self, groups: int) -> None:
        """Expect so many groups more."""
        self._left += groups

    def report(self, replica: int, clock: int, done: Iterable[Sequence[int]]) -> bool:
        """Take in what a replica says: its clock, and (decode step, group) of all it has completed so far.
        Returns whether its clock moved."""
        for step, group in done:
            if group not in self._seen:
                self._seen.add(group)
                self._waiting.add((step, replica, group))
        moved = clock > self._clocks[replica]
        self._clocks[replica] = max(clock, self._clocks[replica])
        return moved

    def release(self) -> list[int]:
        """Groups that are next in the order and safe to begin, once each."""
        safe = min(self._clocks)
        ready = sorted(entry for entry in self._waiting if entry[0] <= safe)
        self._waiting -= set(ready)
        self._left -= len(ready)
        return [group for _, _, group in ready]


class DecodeBoard:
    """A rank's view of all replicas of its training group, over the rendezvous store. Used by the rollout lane only.

    Args:
        store: a connection of its own: another thread's blocking read must not delay it. None where `replicas` is 1
            and no other rank listens.
        name: of the training group, unique in the run.
        replica: this rank's; None where it decodes nothing and only listens.
        posts: whether this rank speaks for its replica.
    """

    def __init__(self, store: Store | None, name: str, replica: int | None, replicas: int, *, posts: bool) -> None:
        self._store, self._name, self._replica, self._replicas, self._posts = store, name, replica, replicas, posts
        self._step = 0
        self._order = MergedOrder(replicas, 0)
        self._done: list[tuple[int, int]] = []

    def begin_step(self, step: int, groups: int) -> None:
        """A new step with this many groups in the whole training group."""
        self._step, self._order, self._done = step, MergedOrder(self._replicas, groups), []

    @property
    def complete(self) -> bool:
        """Whether every group of the step was released."""
        return self._order.complete

    def add_group(self) -> None:
        """One group more than the step began with."""
        self._order.add(1)

    def advance(self, clock: int, completed: Iterable[tuple[int, int]], *, finished: bool) -> None:
        """This replica has taken `clock` decode steps; `completed` are new (decode step, group)."""
        if self._replica is None:
            return
        self._done += completed
        clock = FINISHED if finished else clock
        self._order.report(self._replica, clock, self._done)
        if self._posts and self._store is not None:
            self._store.set(self._key(self._replica), json.dumps([self._step, clock, self._done]))

    def listen(self) -> bool:
        """Hear the other replicas. Returns whether any of them got on."""
        moved = False
        for replica in range(self._replicas):
            key = self._key(replica)
            if replica == self._replica or self._store is None or not self._store.check([key]):
                continue
            step, clock, done = json.loads(self._store.get(key))
            if step == self._step:
                moved |= self._order.report(replica, clock, done)
        return moved

    def release(self) -> list[int]:
        """See `MergedOrder.release`."""
        return self._order.release()

    def _key(self, replica: int) -> str:
        return f"{self._name}/decoded/{replica}"
