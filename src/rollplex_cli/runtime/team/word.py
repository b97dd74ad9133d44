"""What one rank of a training group finds and the others must take from it, whatever they would find themselves."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollplex_cli.runtime.control.peers import Store

POLL_S = 0.002


class LeaderWord:
    """Values by name over the rendezvous store, in any order on any rank. Used by the host lane only.

    A reward function may be anything but a function (a judge, a sandbox, a clock): ranks that asked it separately would
    train on different advantages.

    Args:
        store: a connection that nobody else uses; None where the training group is this rank alone.
        name: of the training group, unique in the run.
    """

    def __init__(self, store: Store | None, name: str, *, leads: bool) -> None:
        self._store, self._name, self._leads = store, name, leads
        self._told: dict[int, list[str]] = {}

    def of(self, step: int, name: str, find: Callable[[], Any], check: Callable[[], None]) -> Any:
        """The leader's `find()`, plain data that JSON keeps; `check` is called while waiting and may raise."""
        if self._store is None:
            return find()
        key = f"{self._name}/word/{step}/{name}"
        if self._leads:
            value = find()
            self._store.set(key, json.dumps(value))
            self._told.setdefault(step, []).append(key)
            # Everybody has left the step before the last one.
            for old in [s for s in self._told if s < step - 1]:
                for stale in self._told.pop(old):
                    self._store.delete_key(stale)
            return value
        while not self._store.check([key]):
            check()
            time.sleep(POLL_S)
        return json.loads(self._store.get(key))
