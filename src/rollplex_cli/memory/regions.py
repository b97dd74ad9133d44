"""Regions: named ranges of addresses that stay while their memory comes and goes.

Invariants R1-R9 of DESIGN.md.
"""

from __future__ import annotations

from contextlib import ExitStack
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

import torch

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.core.units import GIB, MIB
from rollplex_cli.memory import crash
from rollplex_cli.memory.slots import DEFAULT_ALIGNMENT, SlotTable, TensorSlot
from rollplex_cli.memory.vmm.base import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rollplex_cli.memory.pinned import HostMemory, PinnedBuffer
    from rollplex_cli.memory.vmm.space import Handle, Reservation, VirtualMemory

MIN_HANDLE_BYTES, MAX_HANDLE_BYTES = 64 * MIB, GIB
HANDLES_PER_REGION = 16


def handle_bytes_for(region_bytes: int) -> int:
    """Size of a region's handles in bytes: a 16th of it, between 64 MiB and 1 GiB.

    Giving access costs 2.3 ms for 1 GiB in 16 handles and 0.5 ms in one (H200, tools/gpu/memory/vmm_check.py). The last
    handle is cut to what is left, so large ones waste nothing.
    """
    return min(MAX_HANDLE_BYTES, max(MIN_HANDLE_BYTES, region_bytes // HANDLES_PER_REGION))


class RegionError(RunFailedError):
    """A region asked for something that its state does not allow."""


class RegionState(StrEnum):
    """Where the memory of a region is."""

    UNMAPPED = "unmapped"
    MAPPED = "mapped"
    BROKEN = "broken"
    """An operation failed and could not be undone either: only `close` is left."""
    CLOSED = "closed"


class Content(StrEnum):
    """What the bytes are after unmap and map."""

    UNDEFINED = "undefined"
    """Whatever the new pages hold."""
    ZEROED = "zeroed"
    """Zeros."""
    SAVED = "saved"
    """As before: copied to the host at each unmap and back at map."""
    CONSTANT = "constant"
    """As before, and never written after the first unmap: copied to the host only then."""


class Region:
    """A reserved range with a name; `map` gives it memory and `unmap` takes it away, at the same address.

    Callers with a budget make and move regions through `manager.MemoryManager`, which checks it first. Thread-safe.

    Args:
        memory: the device.
        name: who owns the bytes in the ledger and in messages.
        num_bytes: rounded up to the granularity of the driver.
        content: what the bytes are after unmap and map.
        host: where saved contents are kept; needed for `SAVED` and `CONSTANT`.
        handle_bytes: size of its handles; the last one may be smaller. Left out, `handle_bytes_for` chooses.
    """

    def __init__(
        self,
        memory: VirtualMemory,
        name: str,
        num_bytes: int,
        *,
        content: Content = Content.UNDEFINED,
        host: HostMemory | None = None,
        handle_bytes: int | None = None,
    ) -> None:
        self._keeps = content in (Content.SAVED, Content.CONSTANT)
        if self._keeps and host is None:
            raise ValueError(f"`{name}` keeps its content, which needs host memory: `{content}`")
        self.memory = memory
        self._host = host
        self.name = name
        self.content = content
        self.size_bytes = memory.round_up(num_bytes)
        step = memory.round_up(handle_bytes_for(self.size_bytes) if handle_bytes is None else handle_bytes)
        self.handle_bytes = step
        self._pieces = [(start, min(step, self.size_bytes - start)) for start in range(0, self.size_bytes, step)]
        self._holes: list[tuple[int, int]] = []
        """Those of the pieces that may go while the others stay (`holes`)."""
        self.punched = False
        self._handles: list[Handle] = []
        self._slots = SlotTable(name, self.size_bytes)
        self._drains: list[Callable[[], object]] = []
        self._backup: PinnedBuffer | None = None
        self._saved_bytes = 0
        self._why_unmapped = "not mapped yet"
        self._reservation: Reservation = memory.reserve(self.size_bytes)
        self.address = self._reservation.address
        self.state = RegionState.UNMAPPED
        crash.mark_unmapped(self.address, self.size_bytes, name, self._why_unmapped)

    @property
    def held_bytes(self) -> int:
        """Device bytes that are the region's in the ledger."""
        return self.memory.holders().get(self.name, 0)

    @property
    def hole_bytes(self) -> int:
        """What `holes.punch` gives back; 0 where nothing was cut."""
        return sum(size for _, size in self._holes)

    @property
    def slots(self) -> tuple[TensorSlot, ...]:
        """Tensors placed so far, by offset."""
        return self._slots.ordered()

    def place(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        offset: int | None = None,
        alignment: int = DEFAULT_ALIGNMENT,
    ) -> TensorSlot:
        """Decide where a tensor lies, mapped or not: behind all others, or at `offset` bytes.

        Raises:
            ValueError: a name twice, an overlap, a place outside of the region or misaligned, no elements.
        """
        with self.memory.exclusive():
            return self._slots.place(name, shape, dtype, offset=offset, alignment=alignment)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor of a slot: zero-copy, contiguous, always at the same address.

        Raises:
            RegionError: the region is not mapped.
            ValueError: no such slot.
        """
        with self.memory.exclusive():
            slot = self._slots.get(name)
            self.require(RegionState.MAPPED, f"give its tensor `{name}`")
            return self._reservation.tensor(slot.offset, slot.shape, slot.dtype)

    def add_drain(self, hook: Callable[[], object]) -> None:
        """Call `hook` before each unmap; it returns when nothing it knows of touches the region any more.

        A hook waits for the streams that use this region and never for the whole device, which would stop decode.
        """
        self._drains.append(hook)

    def map(self) -> None:
        """Give the region memory, and its content if it keeps it. See `map_regions`."""
        map_regions([self])

    def unmap(self, after: str) -> None:
        """Drain, save what is to be kept, and give the memory back. See `unmap_regions`."""
        unmap_regions([self], after)

    def close(self) -> None:
        """Drain and give everything back; the content is lost. Idempotent.

        The address stays reserved while tensors over it live.

        Raises:
            RollplexError: the driver refused; what is left is still the region's, and `close` can be called again.
        """
        if self.state is RegionState.CLOSED:
            return
        self._drain()
        with self.memory.exclusive():
            self.state = RegionState.BROKEN
            for offset, _ in self._holes:
                crash.forget(self.address + offset)
            crash.mark_unmapped(self.address, self.size_bytes, self.name, "closed")
            self._give_back()
            for mapping in reversed(self._reservation.mappings):
                mapping.close()
            self._drop_backup()
            self._reservation.close(on_freed=partial(crash.forget, self.address))
            self.state = RegionState.CLOSED

    def require(self, wanted: RegionState, what: str) -> None:
        """Hold that the region can do `what`, a verb phrase for the message, because its state is `wanted`.

        Raises:
            RegionError: it is another one.
        """
        if self.state is not wanted:
            raise RegionError(f"`{self.name}` cannot {what}: it has to be `{wanted}` and is `{self.state}`")

    def _drain(self) -> None:
        for hook in self._drains:
            hook()

    def _bytes(self, num_bytes: int) -> torch.Tensor:
        return self._reservation.tensor(0, (num_bytes,), torch.uint8)

    def _attach(self, undo: ExitStack) -> None:
        """Create, map and fill. Whatever was done is on `undo`."""
        self._attach_pieces(self._pieces, undo)
        self.memory.set_access(self._reservation, 0, self.size_bytes)
        if self._saved_bytes:
            assert self._backup is not None
            self._bytes(self._saved_bytes).copy_(self._backup.tensor[: self._saved_bytes])
        elif self.content is Content.ZEROED and not self.memory.driver.zeroes_new_memory:
            self._bytes(self.size_bytes).zero_()
        self._finish_copies()

    def _attach_pieces(self, pieces: Sequence[tuple[int, int]], undo: ExitStack) -> None:
        for offset, size in pieces:
            handle = self.memory.create(size, self.name)
            self._handles.append(handle)
            undo.callback(self._handles.remove, handle)
            undo.callback(handle.close)
            undo.callback(self.memory.map(self._reservation, offset, handle).close)

    def _detach(self, undo: ExitStack) -> None:
        """Save and unmap, keeping the handles so that `undo` can bring every byte back."""
        self._save(undo)
        for mapping in reversed(self._reservation.mappings):
            mapping.close()
            undo.callback(self._reattach, mapping.offset, mapping.handle)

    def _reattach(self, offset: int, handle: Handle) -> None:
        self.memory.map(self._reservation, offset, handle)
        self.memory.set_access(self._reservation, offset, handle.size)

    def _save(self, undo: ExitStack) -> None:
        """Copy what has to be kept to the host."""
        used = self._slots.used_bytes
        if not self._keeps or not used or (self.content is Content.CONSTANT and used == self._saved_bytes):
            return
        # Else a constant content that is written once more after a failure would not be copied again.
        undo.callback(setattr, self, "_saved_bytes", self._saved_bytes)
        if self._backup is None:
            assert self._host is not None
            self._backup = self._host.allocate(f"{self.name} (saved)", self.size_bytes)
            undo.callback(self._drop_backup)
        self._backup.tensor[:used].copy_(self._bytes(used))
        self._finish_copies()
        self._saved_bytes = used

    def _drop_backup(self) -> None:
        if self._backup is not None:
            self._backup.close()
        self._backup, self._saved_bytes = None, 0

    def _finish_copies(self) -> None:
        device = torch.device(self.memory.driver.device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()

    def _give_back(self) -> None:
        for handle in self._handles:
            handle.close()
        self._handles.clear()

    def _settle(self) -> None:
        """Set the state to what is true of the mappings, whatever happened before."""
        mappings = self._reservation.mappings
        usable = {mapping.offset for mapping in mappings if mapping.accessible}
        pieces, holes = {offset for offset, _ in self._pieces}, {offset for offset, _ in self._holes}
        self.punched = bool(holes) and usable == pieces - holes and len(mappings) == len(usable)
        for offset in holes:
            crash.forget(self.address + offset)
        if usable == pieces or self.punched:
            self.state = RegionState.MAPPED
            crash.forget(self.address)
        else:
            self.state = RegionState.BROKEN if mappings or self._handles else RegionState.UNMAPPED
            crash.mark_unmapped(self.address, self.size_bytes, self.name, self._why_unmapped)
        for offset, size in self._holes if self.punched else ():
            crash.mark_unmapped(self.address + offset, size, self.name, self._why_unmapped)


def map_regions(regions: Sequence[Region]) -> None:
    """Give all of them memory, or none if one fails.

    Raises:
        OutOfMemoryError: wanted, free and held by whom; every region is as before.
        RegionError: one of them is not UNMAPPED.
        ValueError: they are not distinct regions of one memory.
    """
    check_movable(regions, RegionState.UNMAPPED)
    if not regions:
        return
    memory = regions[0].memory
    with memory.exclusive():
        check_movable(regions, RegionState.UNMAPPED)
        try:
            with ExitStack() as undo:
                for region in regions:
                    region._attach(undo)
                undo.pop_all()
        except OutOfMemoryError as error:
            raise out_of_memory(memory, regions) from error
        finally:
            for region in regions:
                region._settle()


def unmap_regions(regions: Sequence[Region], after: str) -> None:
    """Drain all of them, save what is to be kept, and give their memory back; or none if one fails.

    Args:
        regions: drained before anything else, outside of every lock.
        after: the task or phase whose end this is; the message of a later crash names it.

    Raises:
        OutOfMemoryError: no host memory for the content; every region is as before.
        RegionError: one of them is not MAPPED.
        ValueError: they are not distinct regions of one memory.
    """
    check_movable(regions, RegionState.MAPPED)
    if not regions:
        return
    for region in regions:
        region._drain()
    with regions[0].memory.exclusive():
        check_movable(regions, RegionState.MAPPED)
        try:
            with ExitStack() as undo:
                for region in regions:
                    region._detach(undo)
                undo.pop_all()
            for region in regions:
                region._why_unmapped = f"unmapped after {after}"
                region._give_back()
        finally:
            for region in regions:
                region._settle()


def check_movable(regions: Sequence[Region], wanted: RegionState) -> None:
    """Hold that a set of regions can move together out of the state `wanted`.

    Raises:
        RegionError: one of them is in another state.
        ValueError: they are not distinct regions of one memory.
    """
    if len(set(regions)) != len(regions) or len({id(region.memory) for region in regions}) > 1:
        raise ValueError("regions that move together are distinct and of one memory")
    for region in regions:
        region.require(wanted, "be mapped" if wanted is RegionState.UNMAPPED else "be unmapped")


def out_of_memory(memory: VirtualMemory, regions: Sequence[Region]) -> OutOfMemoryError:
    """What to raise where the device had too little for `regions`."""
    names = ", ".join(f"`{region.name}`" for region in regions)
    return OutOfMemoryError(
        f"{names} on `{memory.driver.device}`",
        wanted_bytes=sum(region.size_bytes for region in regions),
        free_bytes=memory.free_bytes(),
        holders=memory.ledger.snapshot().by_owner,
        hint="other processes may hold memory of this device too",
    )
