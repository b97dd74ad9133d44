"""Residency: objects of the lifetime table in regions, mapped for the tasks that use them and gone in between.

Only objects with one place for the whole run are managed here; those of a prompt group are made and freed by tasks
(`leases.ObjectStore`). Invariants S1-S5 of DESIGN.md.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from rollplex_cli.core.errors import DoesNotFitError, LeaseError, RunFailedError
from rollplex_cli.core.names import NO_GROUP, TaskKey, TaskKind
from rollplex_cli.core.units import format_bytes
from rollplex_cli.memory import crash, holes
from rollplex_cli.memory.lifetimes import LIFETIMES
from rollplex_cli.memory.regions import Content, Region, RegionState
from rollplex_cli.memory.slots import packed_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rollplex_cli.memory.manager import MemoryManager

Spec = tuple["Sequence[int]", torch.dtype]
"""Shape and type of a tensor."""


class Policy(StrEnum):
    """What happens between the lifetimes of an object. No choice here changes a result."""

    MANAGED = "managed"
    """Unmapped after the last use, mapped for the next first one."""
    RESIDENT = "resident"
    """Mapped from the start to the end of the run: what lifetimes are measured against."""


@dataclass(slots=True, eq=False)
class _Object:
    """One object in its region."""

    region: Region
    moving: threading.RLock = field(default_factory=threading.RLock)
    """Held while it is mapped or unmapped and while leases are counted; never together with the store's lock."""
    leased: int = 0
    fences: dict[int, Any] = field(default_factory=dict)
    """Event behind the last use of each stream, by stream."""
    left: int = 0
    """Tasks of this step that may still use it."""
    ended: str = ""
    """After which task of which step and phase the lifetime ended; empty before that."""


class Residency:
    """Maps objects when their first user starts and unmaps them after their last one. Thread-safe.

    An object's users are those of `LIFETIMES`; its life in a step begins with the first lease and ends when every task
    of its users is done or cancelled. The last user unmaps it, or `release_due` on a lane where the last one was
    cancelled.

    Args:
        manager: budget and regions.
        policy: see `Policy`.
        where: what to call this moment in messages, as in `step 3, phase LEARN`.
    """

    def __init__(
        self, manager: MemoryManager, policy: Policy = Policy.MANAGED, *, where: Callable[[], str] = lambda: "no step"
    ) -> None:
        self.manager, self.policy, self._where = manager, policy, where
        self._kept: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        # Guarded by `_lock`: `left` and `ended` of the objects, and these. Entered while the rank is built.
        self._objects: dict[str, _Object] = {}
        self._due: dict[str, str] = {}

    # ---- building ----------------------------------------------------------------------------------------

    def place(
        self,
        name: str,
        specs: Mapping[str, Spec],
        *,
        content: Content = Content.UNDEFINED,
        stays: bool = False,
        may_go: Mapping[str, Sequence[tuple[int, int]]] | None = None,
    ) -> dict[str, torch.Tensor]:
        """Make the object's region, map it, and give its tensors, which keep their addresses to the end of the run.

        Whoever fills them calls `rest` when that is done. With `stays` the region is mapped for the whole run and
        needs no lease, but for the bytes that `may_go` names: (offset, size) ranges by tensor, see `punch`.

        Raises:
            OutOfMemoryError: over `memory.budget_gib`, or the device is full.
            ValueError: it was placed already.
        """
        row = LIFETIMES[name]
        region = self.manager.region(row.name, packed_bytes(specs.values()), content=content)
        ranges: list[tuple[int, int]] = []
        try:
            for tensor, (shape, dtype) in specs.items():
                slot = region.place(tensor, shape, dtype)
                ranges += [(slot.offset + first, size) for first, size in (may_go or {}).get(tensor, ())]
            if ranges:
                holes.cut(region, ranges)
            self.manager.map(name)
        except BaseException:
            self.manager.close_region(name)
            raise
        held = _Object(region)
        region.add_drain(lambda: _drain(held))
        if not stays:
            with self._lock:
                self._objects[name] = held
        return {tensor: region.tensor(tensor) for tensor in specs}

    def keep(self, names: Iterable[str]) -> None:
        """Between steps: these objects, where they are placed, have memory from now on as under `resident`, and no
        others do. What was kept and is not any more goes.

        Raises:
            OutOfMemoryError: as `lease`.
        """
        before, self._kept = self._kept, frozenset(names)
        for name in before - self._kept:
            self._unmap(name, "being kept")
        for name in self._kept & self._objects.keys():
            with self._objects[name].moving:
                self._map(name, self._objects[name])

    def rest(self, name: str) -> None:
        """The object is built and nobody uses it before its next lease."""
        self._unmap(name, "its construction")

    def is_placed(self, name: str) -> bool:
        """Whether the object lies in a region of this rank."""
        return name in self._objects

    def is_mapped(self, name: str) -> bool:
        """Whether the object was placed and has memory now."""
        held = self._objects.get(name)
        return held is not None and held.region.state is RegionState.MAPPED

    # ---- a step ------------------------------------------------------------------------------------------

    def expect(self, tasks: Iterable[TaskKey]) -> None:
        """These tasks are about to run: lifetimes of what they use begin anew."""
        kinds = [key.kind for key in tasks]
        with self._lock:
            for name, held in self._objects.items():
                users = sum(kind in LIFETIMES[name].users for kind in kinds)
                if users:
                    held.left, held.ended = users, ""

    def around(self, bodies: Mapping[TaskKind, Callable[[TaskKey], Any]]) -> dict[TaskKind, Callable[[TaskKey], Any]]:
        """Bodies of tasks that hold a lease of everything managed that their kind uses."""

        def leasing(body: Callable[[TaskKey], Any], names: list[str]) -> Callable[[TaskKey], Any]:
            def run(key: TaskKey) -> Any:
                with self.explaining(f"`{key}`"):
                    with ExitStack() as leases:
                        for name in names:
                            leases.enter_context(self.lease(name, key))
                        result = body(key)
                    # Before the task counts as done: what follows may need the memory.
                    for name in names:
                        if self._is_last(name):
                            self.end(name, key)
                return result

            return run

        used = {kind: [name for name in self._objects if kind in LIFETIMES[name].users] for kind in bodies}
        return {kind: leasing(body, used[kind]) for kind, body in bodies.items()}

    @contextmanager
    def lease(self, name: str, by: TaskKey) -> Iterator[Region]:
        """Use an object in the task `by`; it is mapped from here on if it was not.

        Raises:
            LeaseError: the task has no use of it, or its lifetime ended; with object, task, phase, and where it ended.
            OutOfMemoryError: over `memory.budget_gib`, or the device is full.
        """
        row = LIFETIMES[name]
        if by.kind not in row.users:
            users = ", ".join(sorted(row.users))
            raise LeaseError(f"`{by}` has no use of `{name}` ({self._where()})", hint=f"its users are: {users}")
        held = self._get(name)
        with held.moving:
            with self._lock:
                ended = held.ended
            if ended:
                raise LeaseError(f"`{by}` asked for `{name}` ({self._where()}), whose lifetime ended after {ended}")
            self._take(name, held)
        try:
            yield held.region
        finally:
            _give(held)

    def task_ended(self, key: TaskKey) -> None:
        """A task is done or cancelled. Takes no time: what is over is unmapped by the next `release_due`."""
        with self._lock:
            for name, held in self._objects.items():
                if key.kind in LIFETIMES[name].users and held.left > 0:
                    held.left -= 1
                    if held.left == 0:
                        held.ended = self._due[name] = f"`{key}` ({self._where()})"

    def release_due(self) -> None:
        """Unmap what no task of the step will use any more. Called on a lane, between two tasks.

        Raises:
            LeaseError: something of it is still leased.
        """
        with self._lock:
            due, self._due = self._due, {}
        for name, after in due.items():
            self._unmap(name, after)

    def end(self, name: str, by: TaskKey) -> None:
        """The object's lifetime is over with the task `by`, whatever tasks are left to be reported."""
        with self._lock:
            held = self._objects.get(name)
            if held is None:
                return
            held.left, held.ended = 0, f"`{by}` ({self._where()})"
            self._due.pop(name, None)
            after = held.ended
        self._unmap(name, after)

    def punch(self, name: str, by: TaskKey) -> None:
        """Nobody reads the bytes of `name` that may go before `fill`: unmap them. Called on the one lane that reads
        them, whose stream is drained."""
        if self._releases(name) and self._has_holes(name, punched=False):
            if torch.cuda.is_initialized():
                torch.cuda.current_stream().synchronize()
            self.manager.punch(name, after=f"`{by}` ({self._where()})")

    def fill(self, name: str) -> None:
        """Map what `punch` took, with undefined content."""
        if self._has_holes(name, punched=True):
            self.manager.fill(name)

    # ---- outside of steps --------------------------------------------------------------------------------

    @contextmanager
    def hold(self, name: str, who: str) -> Iterator[None]:
        """Use an object outside of any task (evaluation, measurements); unmapped again afterwards.

        An object that was never placed needs no holding.

        Raises:
            OutOfMemoryError: as `lease`.
        """
        held = self._objects.get(name)
        if held is None:
            yield
            return
        with held.moving:
            self._take(name, held)
        try:
            yield
        finally:
            _give(held)
        self._unmap(name, who)

    @contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """Give errors of PyTorch inside that are about memory the names that this rank knows.

        Raises:
            DoesNotFitError: for torch.OutOfMemoryError, with who holds the memory.
            RunFailedError: for an illegal memory access of a kernel, with what is not mapped.
        """
        try:
            yield
        except torch.OutOfMemoryError as error:
            usage = self.manager.usage()
            held = ", ".join(f"`{name}` {format_bytes(size)}" for name, size in usage.holders.items())
            raise DoesNotFitError(
                f"PyTorch found no memory for {what} ({self._where()}): {str(error).split('. ')[0]}; "
                f"of {format_bytes(usage.budget_bytes)} are held: {held}",
                hint="raise `memory.budget_gib`, or see `rollplex profile-memory` for the smallest change that fits",
            ) from error
        except RuntimeError as error:
            if "illegal memory access" not in str(error):
                raise
            gone = "; ".join(f"`{entry.region}`, {entry.state}" for entry in crash.unmapped_ranges())
            raise RunFailedError(
                f"a kernel used memory that is not there, seen in {what} ({self._where()}); not mapped now: {gone}",
                hint="something kept a tensor or a pointer beyond the lease of its task",
            ) from error

    def close(self) -> None:
        """Give everything back. Nothing may use a tensor of any object afterwards."""
        with self._lock:
            self._objects.clear()
            self._due.clear()
        self.manager.close()

    # ---- inside ------------------------------------------------------------------------------------------

    def _get(self, name: str) -> _Object:
        held = self._objects.get(name)
        if held is None:
            raise LeaseError(f"`{name}` is not in a region of this rank ({self._where()})")
        return held

    def _releases(self, name: str) -> bool:
        return self.policy is Policy.MANAGED and name not in self._kept

    def _has_holes(self, name: str, *, punched: bool) -> bool:
        region = self.manager.get(name)
        return region.hole_bytes > 0 and region.punched is punched

    def _is_last(self, name: str) -> bool:
        with self._lock:
            return self._objects[name].left == 1

    def _map(self, name: str, held: _Object) -> None:
        if held.region.state is RegionState.UNMAPPED:
            self.manager.map(name)

    def _take(self, name: str, held: _Object) -> None:
        self._map(name, held)
        held.leased += 1

    def _unmap(self, name: str, after: str) -> None:
        held = self._objects.get(name)
        if held is None:
            return
        with held.moving:
            if held.leased:
                raise LeaseError(f"`{name}` is still leased after {after} ({self._where()})")
            if self._releases(name) and held.region.state is RegionState.MAPPED:
                self.manager.unmap(name, after=after)


def _give(held: _Object) -> None:
    with held.moving:
        held.leased -= 1
        if torch.cuda.is_initialized():
            stream = torch.cuda.current_stream()
            event = held.fences.get(stream.cuda_stream)
            if event is None:
                event = held.fences[stream.cuda_stream] = torch.cuda.Event()
            event.record(stream)


def _drain(held: _Object) -> None:
    """Wait for the last use of each stream, and for nothing else of the device."""
    for event in held.fences.values():
        event.synchronize()


DECODES = TaskKey(TaskKind.DECODE, NO_GROUP)
"""All decodes of a step, which share the rollout's batch."""
