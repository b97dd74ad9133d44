"""When the trainer may work beside decode, and on how much of the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex_cli.core.names import Lane
from rollplex_cli.runtime.executor.graph import LANES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollplex_cli.core.names import TaskKey, TaskKind
    from rollplex_cli.profile.sharing import SharingPolicy
    from rollplex_cli.runtime.executor.executor import Fence
    from rollplex_cli.runtime.sharing.streams import TrainerStreams

MIN_EFFICIENCY = 1.02
"""Co-run efficiency below which `auto` does not overlap: 1 is time slicing, and a measurement is good to 2 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What `auto` does while up to `batch` responses decode."""

    batch: int
    overlap: bool
    reserved_sms: int
    efficiency: float
    """Measured: decode's share of its own rate plus the trainer's share of its own."""


class Sharing:
    """One rank's sharing of its device. No decision here changes a result (invariant 6 of the design).

    The rollout lane reports its batch; the trainer lane calls `enter` through the bodies that `around` makes.

    Args:
        policy: what to follow.
        streams: the trainer's streams; None without a GPU, where policies differ in `overlap` only.
        num_sms: multiprocessors of the GPU.
    """

    def __init__(self, policy: SharingPolicy, streams: TrainerStreams | None = None, num_sms: int = 0) -> None:
        self._policy = policy
        self._streams, self._num_sms = streams, num_sms
        self._choices: tuple[Choice, ...] = ()
        self.decode_batch = 0
        """Responses that decode now."""

    @property
    def policy(self) -> SharingPolicy:
        """The policy followed now."""
        return self._policy

    @property
    def streams(self) -> TrainerStreams | None:
        """The trainer's streams; None without a GPU."""
        return self._streams

    @property
    def choices(self) -> tuple[Choice, ...]:
        """What was measured for `auto`, smallest batch first; empty before."""
        return self._choices

    def follow(self, policy: SharingPolicy) -> None:
        """Follow another policy from now on; between steps."""
        self._policy = policy

    def decide(self, choices: Sequence[Choice]) -> None:
        """Take over what was measured, for `auto`."""
        self._choices = tuple(sorted(choices, key=lambda choice: choice.batch))

    def report(self, decode_batch: int) -> None:
        """How many responses decode now; called by the rollout lane."""
        self.decode_batch = decode_batch

    def may_overlap(self) -> bool:
        """Whether the trainer may start a task while decode runs."""
        if self._policy.measured and self._choices:
            return self._choice().overlap
        return self._policy.overlap

    def reserved_sms(self) -> int:
        """SMs that the trainer must leave alone while decode runs."""
        policy = self._policy
        if policy.measured and self._choices:
            return self._choice().reserved_sms
        if policy.decode_percent is not None:
            return max(1, self._num_sms * policy.decode_percent // 100)
        return policy.reserved_sms

    def enter(self, *, decoding: bool) -> None:
        """Put this thread's next work on the right stream; called on the trainer lane."""
        if self._streams is not None:
            high = decoding and self._policy.equal_priority
            self._streams.enter(self.reserved_sms() if decoding else 0, high_priority=high)

    def around(
        self, bodies: Mapping[TaskKind, Callable[[TaskKey], Fence | None]], decoding: Callable[[], bool]
    ) -> dict[TaskKind, Callable[[TaskKey], Fence | None]]:
        """Bodies of tasks that first enter the stream of the moment, where they are the trainer's."""

        def entering(body: Callable[[TaskKey], Fence | None]) -> Callable[[TaskKey], Fence | None]:
            def run(key: TaskKey) -> Fence | None:
                self.enter(decoding=decoding())
                return body(key)

            return run

        return {kind: entering(body) if LANES[kind] is Lane.TRAINER else body for kind, body in bodies.items()}

    def _choice(self) -> Choice:
        """The measured batch that the present one does not exceed, else the largest."""
        for choice in self._choices:
            if self.decode_batch <= choice.batch:
                return choice
        return self._choices[-1]
