"""What each lane of a rank has launched for other ranks to take part in: named, numbered, with its age.

Where a lane hangs, this is what says in which collective. It is written wherever one is issued, by whichever thread
does it (a backward's collectives come from autograd's own), and read by the control thread.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True, slots=True)
class GroupName:
    """A process group as messages name it."""

    label: str
    ranks: tuple[int, ...] = ()
    """Global ranks of its members."""


@dataclass(slots=True)
class Launch:
    """One collective, or one batch of the rollout that holds many."""

    operation: str
    group: GroupName
    number: int
    """Counts the launches of a lane in a group from 1; all members have the same numbers, as they make the same calls
    in the same order."""
    num_bytes: int
    task: str
    since: float = field(default_factory=time.monotonic)
    """When the lane came to it, on the monotonic clock, in seconds."""
    state: Literal["turn", "launching", "launched"] = "turn"
    fence: Any = None
    """What the device has to pass for the launch to be finished; None where it was when the call returned."""

    @property
    def finished(self) -> bool:
        """Whether nothing of it is left to do; never on a device that has failed. Any thread."""
        try:
            return self.state == "launched" and (self.fence is None or bool(self.fence.query()))
        except RuntimeError:  # whoever asks is about to report that failure
            return False


class CollectiveLog:
    """The launches of one lane, of which the last are kept.

    Args:
        lane: name of the lane.
        turn: around every launch on a device group: waits until it is its turn (`runtime/launches`).
        on_device: whether launches return before they are finished; an event behind each then tells.
    """

    def __init__(
        self,
        lane: str,
        turn: Callable[[], AbstractContextManager[Any]] = nullcontext,
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
        self._turn = turn
        self.latest: dict[str, Launch] = {}
        """The last launch in each group, by the group's label."""
        self._fence = torch.cuda.Event() if on_device else None

    @contextmanager
    def launch(self, operation: str, group: GroupName, num_bytes: int = 0, *, on_host: bool = False) -> Iterator[None]:
        """Around the calls that launch one collective or batch.

        Args:
            on_host: it runs on a group of its own on the host, blocks until it is finished and takes no turn.
        """
        before = self.latest.get(group.label)
        made = Launch(operation, group, before.number + 1 if before else 1, num_bytes, self.task)
        self.last = self.latest[group.label] = made
        with nullcontext() if on_host else self._turn():
            made.state = "launching"
            yield
            if self._fence is not None and not on_host:
                # One event for all: it stands behind the last launch, which is the only one that is asked for.
                self._fence.record(self.stream)
                made.fence = self._fence
        made.state = "launched"


def name_of(label: str, group: dist.ProcessGroup | None) -> GroupName:
    """The name of a process group of this rank; None stands for one that there is not."""
    return GroupName(label, tuple(dist.get_process_group_ranks(group)) if group is not None else ())


def unwatched() -> CollectiveLog:
    """A log that nobody reads, for engines without a runtime around them."""
    return CollectiveLog("")
