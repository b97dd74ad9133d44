"""Managed objects and the leases through which tasks use them (invariant 5 of the design)."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import LeaseError
from rollplex_cli.memory.lifetimes import LIFETIMES, freed_by

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollplex_cli.core.names import TaskKey

_Slot = tuple[str, int]


class ObjectStore:
    """Holds the objects of a step. Thread-safe; every access names the task that makes it.

    Invariants: an object is made once, by its maker (M1); it is leased only to tasks of its users, of its own
    group, between its making and its last use (M2); it is gone after its last use, done or cancelled (M3);
    it is never freed under an active lease (M4).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: dict[_Slot, Any] = {}
        self._freed: dict[_Slot, str] = {}
        self._leased: dict[_Slot, int] = {}
        self._bytes: dict[_Slot, int] = {}
        self._peaks: dict[str, int] = {}

    def put(self, name: str, value: object, by: TaskKey) -> None:
        """Hand over the object `name` made by the task `by` for its group.

        Raises:
            LeaseError: the task is not its maker, or the object exists or has been freed already.
        """
        row = LIFETIMES[name]
        slot = (name, by.group)
        with self._lock:
            if by.kind not in (row.maker, row.relay):
                raise LeaseError(f"`{by}` cannot make `{name}`, which is made by `{row.maker}`")
            if slot in self._objects:
                raise LeaseError(f"`{name}` of group {by.group} exists already")
            if slot in self._freed:
                return  # its last use was cancelled while the maker ran: nobody will come for it
            self._objects[slot] = value
            # Boundaries say how large they are; everything else is small.
            self._bytes[slot] = getattr(value, "boundary_bytes", 0)
            held = sum(size for (other, _), size in self._bytes.items() if other == name)
            self._peaks[name] = max(self._peaks.get(name, 0), held)

    @contextmanager
    def lease(self, name: str, by: TaskKey) -> Iterator[Any]:
        """Use the object `name` of the task's own group.

        Raises:
            LeaseError: naming the object, the task and where the object was freed, if it was.
        """
        row = LIFETIMES[name]
        slot = (name, by.group)
        with self._lock:
            if by.kind not in row.users:
                users = ", ".join(sorted(row.users))
                raise LeaseError(f"`{by}` has no use of `{name}`", hint=f"its users are: {users}")
            if slot not in self._objects:
                freed = self._freed.get(slot)
                state = f"was freed after `{freed}`" if freed else f"was not made yet by `{row.maker}`"
                raise LeaseError(f"`{by}` asked for `{name}` of group {by.group}, which {state}")
            self._leased[slot] = self._leased.get(slot, 0) + 1
            value = self._objects[slot]
        try:
            yield value
        finally:
            with self._lock:
                self._leased[slot] -= 1

    def holds(self, name: str, by: TaskKey) -> bool:
        """Whether the object `name` of the task's own group exists."""
        with self._lock:
            return (name, by.group) in self._objects

    def task_ended(self, key: TaskKey) -> None:
        """Free the objects whose last use was this task, done or cancelled."""
        with self._lock:
            for name in freed_by(key.kind):
                slot = (name, key.group)
                if self._leased.get(slot):
                    raise LeaseError(f"`{name}` of group {key.group} is still leased at the end of `{key}`")
                self._objects.pop(slot, None)
                self._bytes.pop(slot, None)
                self._leased.pop(slot, None)
                self._freed[slot] = str(key)

    def held(self) -> list[str]:
        """Names of the objects held now, with their groups."""
        with self._lock:
            return sorted(f"{name}[{group}]" for name, group in self._objects)

    def take_peaks(self) -> dict[str, int]:
        """Largest sum over all groups, in bytes, of each kind of object that knows its size, since the last call."""
        with self._lock:
            peaks, self._peaks = self._peaks, {}
            for (name, _), size in self._bytes.items():
                self._peaks[name] = self._peaks.get(name, 0) + size
            return {name: size for name, size in peaks.items() if size}

    def end_step(self) -> None:
        """Forget the step.

        Raises:
            LeaseError: something outlived it (invariant 7: no leak from step to step).
        """
        left = self.held()
        with self._lock:
            self._objects.clear()
            self._freed.clear()
            self._leased.clear()
            self._bytes.clear()
        if left:
            raise LeaseError(f"objects outlived their step: {', '.join(left)}")
