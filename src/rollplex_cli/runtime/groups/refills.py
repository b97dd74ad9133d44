"""Dynamic sampling (DAPO, arXiv 2503.14476, section 3.2): groups whose rewards are all equal are replaced.

While a step decodes, every complete group is looked at as soon as its rewards are known; one without a signal is taken
out of the step, and the next prompt of the rank's line is started in its place, `algorithm.max_refills` times at most.

When a group is looked at is a matter of decode steps, not of time, so what is started, and in which order, depends on
nothing else than the responses.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollplex_cli.runtime.groups.intake import Started

LOOK_AFTER_STEPS = 8
"""Decode steps from a group's completion to the look at its rewards, which are computed meanwhile. Decode waits for
rewards that take longer."""


class Refills:
    """Account of the places of a step: each is held by one group at a time. Used by the rollout lane only.

    Args:
        groups: local ids of the groups that the step begins with, 0 .. n - 1.
        max_refills: how often a place is given on.
        further: starts that many more groups; None where nothing is replaced.
    """

    def __init__(
        self, groups: Sequence[int], max_refills: int, further: Callable[[int], list[Started]] | None = None
    ) -> None:
        self._further, self._max_refills = further, max_refills if further is not None else 0
        self._rounds = dict.fromkeys(groups, 0)
        self._num_places = len(groups)
        self._unseen: deque[tuple[int, int]] = deque()

    @property
    def reserve(self) -> range:
        """Ids that further groups may get."""
        return range(self._num_places, self._num_places * (1 + self._max_refills))

    @property
    def active(self) -> bool:
        """Whether groups may be replaced in this step."""
        return self._max_refills > 0

    @property
    def num_unseen(self) -> int:
        """Complete groups whose rewards have not been looked at."""
        return len(self._unseen)

    def completed(self, group: int, clock: int) -> None:
        """The responses of a group are final after `clock` decode steps."""
        if self.active:
            self._unseen.append((clock, group))

    def due(self, clock: int, *, idle: bool) -> list[int]:
        """Groups to look at now, in the order of their completion; all of them where nothing is left to decode."""
        found = []
        while self._unseen and (idle or self._unseen[0][0] + LOOK_AFTER_STEPS <= clock):
            found.append(self._unseen.popleft()[1])
        return found

    def round_of(self, group: int) -> int:
        """How many groups held the place before this one."""
        return self._rounds[group]

    def replace(self, group: int) -> tuple[int, Started] | None:
        """Id and prompt of the group that is started in place of one without a signal; None where its place has been
        given on often enough.

        Raises:
            DataError: as `Intake.further`.
        """
        if self._further is None or self._rounds[group] >= self._max_refills:
            return None
        (started,) = self._further(1)
        new = len(self._rounds)
        self._rounds[new] = self._rounds[group] + 1
        return new, started
