"""What each lane of a rank has launched for other ranks to take part in: named, numbered, with its age.

Where a lane hangs, this is what says in which collective. It is written wherever one is issued, by whichever thread
does it (a backward's collectives come from autograd's own), and read by the control thread.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType


@dataclass(frozen=True, slots=True)
class GroupName:
    """A process group as messages name it."""

    label: str
    ranks: tuple[int, ...] = ()
    """Global ranks of its members."""


class Launch:
    """One collective, or one batch of the rollout that holds many; entered around the calls that launch it.

    A plain object, and not a generator's context: a forward and backward of a sharded model makes hundreds.
    """

    __slots__ = (
        "_log", "_on_host", "_turn", "fence", "group", "num_bytes", "number", "operation", "since", "state", "task",
    )  # fmt: skip

    def __init__(
        self, log: CollectiveLog, operation: str, group: GroupName, number: int, num_bytes: int, on_host: bool
    ) -> None:
        self._log, self._on_host = log, on_host
        self._turn: AbstractContextManager[Any] | None = None
        self.operation, self.group, self.num_bytes, self.task = operation, group, num_bytes, log.task
        self.number = number
        """Counts the launches of a lane in a group from 1; all members have the same numbers, as they make the same
        calls in the same order."""
        self.since = time.monotonic()
        """When the lane came to it, on the monotonic clock, in seconds."""
        self.state: Literal["turn", "launching", "launched"] = "turn"
        self.fence: Any = None
        """What the device has to pass for the launch to be finished; None where it was when the call returned."""

    @property
    def finished(self) -> bool:
        """Whether nothing of it is left to do; never on a device that has failed. Any thread."""
        try:
            return self.state == "launched" and (self.fence is None or bool(self.fence.query()))
        except RuntimeError:  # whoever asks is about to report that failure
            return False

    def __enter__(self) -> None:
        turn = self._log.turn
        if turn is not None and not self._on_host:
            self._turn = turn()
            self._turn.__enter__()
        self.state = "launching"

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._log.stand_behind(self, self._on_host)
        finally:
            turn, self._turn = self._turn, None
            if turn is not None:
                turn.__exit__(kind, error, trace)
        if kind is None:
            self.state = "launched"


class CollectiveLog:
    """The launches of one lane, of which the last are kept.

    Args:
        lane: name of the lane.
        turn: around every launch on a device group: waits until it is its turn (`runtime/launches`); None where
            there are no turns.
        on_device: whether launches return before they are finished; an event behind each then tells.
    """

    def __init__(
        self,
        lane: str,
        turn: Callable[[], AbstractContextManager[Any]] | None = None,
        *,
        on_device: bool = False,
    ) -> None:
        self.lane = lane
        self.task = ""
        """What the lane does, for the names of its launches."""
        self.last: Launch | None = None
        """The launch that it made last, or is in."""
        self.stream: torch.cuda.Stream | None = None
        """What launches run on; None is the current stream of whoever launches."""
        self.turn = turn
        self.latest: dict[str, Launch] = {}
        """The last launch in each group, by the group's label."""
        self._fence = torch.cuda.Event() if on_device else None

    def launch(self, operation: str, group: GroupName, num_bytes: int = 0, *, on_host: bool = False) -> Launch:
        """Around the calls that launch one collective or batch.

        Args:
            on_host: it runs on a group of its own on the host, blocks until it is finished and takes no turn.
        """
        before = self.latest.get(group.label)
        made = Launch(self, operation, group, before.number + 1 if before else 1, num_bytes, on_host)
        self.last = self.latest[group.label] = made
        return made

    def stand_behind(self, launch: Launch, on_host: bool) -> None:
        """Give `launch`, whose calls have returned, what tells when the device is done with it."""
        if self._fence is not None and not on_host:
            # One event for all: it stands behind the last launch, which is the only one that is asked for.
            self._fence.record(self.stream)
            launch.fence = self._fence


def name_of(label: str, group: dist.ProcessGroup | None) -> GroupName:
    """The name of a process group of this rank; None stands for one that there is not."""
    return GroupName(label, tuple(dist.get_process_group_ranks(group)) if group is not None else ())


def unwatched() -> CollectiveLog:
    """A log that nobody reads, for engines without a runtime around them."""
    return CollectiveLog("")
