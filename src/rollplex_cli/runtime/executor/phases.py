"""The phase machine of a rank: a pure transition table and hooks on enter and exit."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import PhaseError
from rollplex_cli.core.names import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

ALLOWED: dict[Phase, frozenset[Phase]] = {
    Phase.GENERATE: frozenset({Phase.LEARN}),
    Phase.LEARN: frozenset({Phase.UPDATE}),
    # A further minibatch of the same rollout goes back to LEARN: boundaries are recomputed under the new weights.
    Phase.UPDATE: frozenset({Phase.PUBLISH, Phase.LEARN}),
    Phase.PUBLISH: frozenset({Phase.GENERATE, Phase.CHECKPOINT, Phase.EVALUATE}),
    Phase.CHECKPOINT: frozenset({Phase.GENERATE, Phase.EVALUATE}),
    Phase.EVALUATE: frozenset({Phase.GENERATE, Phase.CHECKPOINT}),
    Phase.FAILED: frozenset(),
}
"""Transitions besides the one to FAILED, which every other state has."""


def is_allowed(state: Phase, wanted: Phase) -> bool:
    """Whether `state` -> `wanted` is in the table."""
    if wanted is Phase.FAILED:
        return state is not Phase.FAILED
    return wanted in ALLOWED[state]


class PhaseMachine:
    """Current phase of this rank. Transitions are made by the control thread; any thread may read."""

    def __init__(self) -> None:
        self._state = Phase.PUBLISH
        self._lock = threading.RLock()
        self._on_enter: dict[Phase, list[Callable[[], None]]] = defaultdict(list)
        self._on_exit: dict[Phase, list[Callable[[], None]]] = defaultdict(list)

    @property
    def state(self) -> Phase:
        """The phase this rank is in."""
        return self._state

    def on_enter(self, phase: Phase, hook: Callable[[], None]) -> None:
        """Run `hook` after each transition into `phase`."""
        self._on_enter[phase].append(hook)

    def on_exit(self, phase: Phase, hook: Callable[[], None]) -> None:
        """Run `hook` before each transition out of `phase`; a hook that raises forbids the transition."""
        self._on_exit[phase].append(hook)

    def to(self, wanted: Phase) -> None:
        """Go to `wanted`.

        Raises:
            PhaseError: the table does not allow it. The state is unchanged.
            Exception: whatever a hook raised; the machine is then FAILED.
        """
        with self._lock:
            if not is_allowed(self._state, wanted):
                allowed = ", ".join(sorted(ALLOWED[self._state] | {Phase.FAILED})) or "nothing"
                raise PhaseError(
                    f"no transition from `{self._state}` to `{wanted}`",
                    hint=f"allowed from `{self._state}`: {allowed}",
                )
            if wanted is Phase.FAILED:
                self._state = wanted  # hooks of a failed rank could touch what just broke
                return
            try:
                for hook in self._on_exit[self._state]:
                    hook()
                self._state = wanted
                for hook in self._on_enter[wanted]:
                    hook()
            except BaseException:
                self._state = Phase.FAILED
                raise

    def fail(self) -> None:
        """Go to FAILED from anywhere; does nothing when already there."""
        with self._lock:
            self._state = Phase.FAILED
