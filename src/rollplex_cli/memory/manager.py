"""One device's regions under one budget. Invariants M5-M9 of DESIGN.md."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex_cli.memory import holes
from rollplex_cli.memory.pinned import HostMemory
from rollplex_cli.memory.regions import (
    Content,
    Region,
    RegionState,
    check_movable,
    map_regions,
    unmap_regions,
)
from rollplex_cli.memory.vmm.base import OutOfMemoryError
from rollplex_cli.memory.vmm.space import VirtualMemory

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollplex_cli.memory.vmm.base import MemoryDriver

_BUDGET_HINT = "raise `memory.budget_gib`, or see `rollplex profile-memory` for the smallest change that fits"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUsage:
    """Who holds what at one moment, in bytes."""

    budget_bytes: int
    regions: dict[str, int]
    """Mapped regions by name."""
    external: dict[str, int]
    """What was reported from outside: PyTorch, context, graphs, NCCL."""
    driver_used_bytes: int
    """What the driver counts as taken on this device, other processes included."""
    pinned: dict[str, int]
    """Pinned host memory by owner."""

    @property
    def used_bytes(self) -> int:
        """What counts against the budget."""
        return sum(self.regions.values()) + sum(self.external.values())

    @property
    def holders(self) -> dict[str, int]:
        """Regions and reports that hold anything."""
        return self.regions | {owner: size for owner, size in self.external.items() if size}

    @property
    def free_bytes(self) -> int:
        """What the budget has left; negative where reports from outside have grown over it."""
        return self.budget_bytes - self.used_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyChange:
    """One successful map or unmap, for the event log."""

    mapped: bool
    """False for an unmap."""
    regions: tuple[str, ...]
    num_bytes: int
    seconds: float
    """Draining and copies included."""
    after: str
    """Task or phase that an unmap followed; empty for a map."""
    used_bytes: int
    """Against the budget, afterwards."""


class MemoryManager:
    """Makes regions and moves sets of them, within budgets. Thread-safe.

    Args:
        driver: the device; `close` closes it.
        budget_bytes: upper bound of regions plus everything reported from outside, also on a larger device.
        host_budget_bytes: upper bound of pinned host memory.
        on_change: called after each map and unmap, in the thread that asked for it and under no lock.
    """

    def __init__(
        self,
        driver: MemoryDriver,
        *,
        budget_bytes: int,
        host_budget_bytes: int,
        on_change: Callable[[ResidencyChange], object] | None = None,
    ) -> None:
        self.memory = VirtualMemory(driver)
        self.host = HostMemory(driver, host_budget_bytes)
        self.budget_bytes = budget_bytes
        self._on_change = on_change
        # All guarded by `memory.exclusive()`.
        self._regions: dict[str, Region] = {}
        self._external: dict[str, Callable[[], int]] = {}
        self._reclaimers: list[Callable[[], object]] = []
        self._peak = self._usage()

    def region(
        self,
        name: str,
        num_bytes: int,
        *,
        content: Content = Content.UNDEFINED,
        handle_bytes: int | None = None,
    ) -> Region:
        """Reserve a region; it is not mapped and costs nothing yet.

        Raises:
            OutOfMemoryError: it could never be mapped under the budget.
            ValueError: the name is taken.
        """
        with self.memory.exclusive():
            if name in self._regions or name in self._external:
                raise ValueError(f"a region or report of this name exists: `{name}`")
            wanted = self.memory.round_up(num_bytes)
            if wanted > self.budget_bytes:
                raise OutOfMemoryError(
                    f"`{name}` within `memory.budget_gib`",
                    wanted_bytes=wanted,
                    free_bytes=self.budget_bytes,
                    hint=_BUDGET_HINT,
                )
            region = Region(self.memory, name, num_bytes, content=content, host=self.host, handle_bytes=handle_bytes)
            self._regions[name] = region
            return region

    def report(self, owner: str, num_bytes: int | Callable[[], int]) -> None:
        """Count bytes that are not in regions: a number, or a function that is asked each time.

        A later report of the same owner replaces the former. What is reported may exceed the budget: it is there
        already, and the next `map` finds nothing free.

        Raises:
            ValueError: a region has this name.
        """
        with self.memory.exclusive():
            if owner in self._regions:
                raise ValueError(f"a region has this name: `{owner}`")
            self._external[owner] = num_bytes if callable(num_bytes) else _constant(num_bytes)
            self._note_peak()

    def add_reclaimer(self, reclaim: Callable[[], object]) -> None:
        """Call `reclaim` before a `map` fails for the budget or the device: it gives cached memory back."""
        self._reclaimers.append(reclaim)

    def map(self, *names: str) -> None:
        """Map regions: all of them, or none.

        Raises:
            OutOfMemoryError: over the budget or the device's memory; wanted, free and held by whom.
            RegionError: one is not UNMAPPED.
            ValueError: no such region, or one twice.
        """
        start = time.monotonic()
        with self.memory.exclusive():
            regions = [self.get(name) for name in names]
            check_movable(regions, RegionState.UNMAPPED)
            wanted = sum(region.size_bytes for region in regions)
            self._make_room(names, wanted)
            self._map(regions)
            self._note_peak()
            used = self._usage().used_bytes
        self._tell(True, names, wanted, start, "", used)

    def unmap(self, *names: str, after: str) -> None:
        """Drain and unmap regions: all of them, or none.

        Args:
            names: of regions.
            after: task or phase whose end this is, for events and crash messages.

        Raises:
            OutOfMemoryError: no host memory for a content that is kept.
            RegionError: one is not MAPPED.
            ValueError: no such region, or one twice.
        """
        start = time.monotonic()
        regions = [self.get(name) for name in names]
        unmap_regions(regions, after)
        self._tell(False, names, sum(region.size_bytes for region in regions), start, after, self.usage().used_bytes)

    def fill(self, name: str) -> None:
        """Give a region's open holes memory again, with undefined content.

        Raises:
            OutOfMemoryError: over the budget or the device's memory; nothing changed.
            RegionError: its holes are not open.
        """
        start = time.monotonic()
        with self.memory.exclusive():
            region = self.get(name)
            wanted = region.hole_bytes
            self._make_room((name,), wanted)
            holes.fill(region)
            self._note_peak()
            used = self._usage().used_bytes
        self._tell(True, (f"{name} (holes)",), wanted, start, "", used)

    def punch(self, name: str, *, after: str) -> None:
        """Drain a region and give the memory of its holes back; see `holes`.

        Raises:
            RegionError: it is not mapped whole.
        """
        start = time.monotonic()
        region = self.get(name)
        holes.punch(region, after)
        self._tell(False, (f"{name} (holes)",), region.hole_bytes, start, after, self.usage().used_bytes)

    def get(self, name: str) -> Region:
        """The region of this name.

        Raises:
            ValueError: there is none.
        """
        with self.memory.exclusive():
            if name not in self._regions:
                raise ValueError(f"no such region: `{name}`")
            return self._regions[name]

    def close_region(self, name: str) -> None:
        """Give a region back with its addresses; the name is free again."""
        region = self.get(name)
        region.close()
        with self.memory.exclusive():
            self._regions.pop(name, None)

    def usage(self) -> MemoryUsage:
        """Who holds what now."""
        with self.memory.exclusive():
            return self._usage()

    def peak(self, *, reset: bool = False) -> MemoryUsage:
        """The moment of the largest use against the budget since the last reset, among those seen.

        Seen are each map, each report and each call of this: sample where reported bytes peak.
        """
        with self.memory.exclusive():
            self._note_peak()
            peak = self._peak
            if reset:
                self._peak = self._usage()
            return peak

    def check(self) -> None:
        """Compare ledger, owning objects and states.

        Raises:
            RunFailedError: they differ.
        """
        with self.memory.exclusive():
            self.memory.ledger.check(self.memory.live().created_bytes)

    def close(self) -> None:
        """Close every region and the driver. Idempotent."""
        for name in tuple(self._regions):
            self.close_region(name)
        self.memory.driver.close()

    def _usage(self) -> MemoryUsage:
        external = {owner: count() for owner, count in self._external.items()}
        # Asks the driver once more to take what it refused, so the ledger is read afterwards.
        free = self.memory.free_bytes()
        return MemoryUsage(
            budget_bytes=self.budget_bytes,
            regions=self.memory.ledger.snapshot().by_owner,
            external=external,
            driver_used_bytes=self.memory.total_bytes() - free,
            pinned=self.host.holders(),
        )

    def _note_peak(self) -> None:
        usage = self._usage()
        if usage.used_bytes > self._peak.used_bytes:
            self._peak = usage

    def _reclaim(self) -> None:
        for reclaim in self._reclaimers:
            reclaim()

    def _map(self, regions: list[Region]) -> None:
        try:
            map_regions(regions)
            return
        except OutOfMemoryError:
            self._reclaim()
        try:
            map_regions(regions)
        except OutOfMemoryError as error:
            # The device is full although the budget is not: what was reported from outside is part of the answer.
            raise OutOfMemoryError(
                error.what,
                wanted_bytes=error.wanted_bytes,
                free_bytes=error.free_bytes,
                holders=self._usage().holders,
                hint=error.hint,
            ) from error

    def _make_room(self, names: tuple[str, ...], wanted: int) -> None:
        if wanted > self._usage().free_bytes:
            self._reclaim()
        usage = self._usage()
        if wanted > usage.free_bytes:
            raise OutOfMemoryError(
                ", ".join(f"`{name}`" for name in names) + " within `memory.budget_gib`",
                wanted_bytes=wanted,
                free_bytes=usage.free_bytes,
                holders=usage.holders,
                hint=_BUDGET_HINT,
            )

    def _tell(
        self, mapped: bool, names: tuple[str, ...], num_bytes: int, start: float, after: str, used_bytes: int
    ) -> None:
        if self._on_change is not None:
            self._on_change(
                ResidencyChange(
                    mapped=mapped,
                    regions=names,
                    num_bytes=num_bytes,
                    seconds=time.monotonic() - start,
                    after=after,
                    used_bytes=used_bytes,
                )
            )


def _constant(num_bytes: int) -> Callable[[], int]:
    return lambda: num_bytes
