"""The rules of virtual memory, once for all drivers: who owns what, what may overlap, in which order things end.

Each driver resource has one owning object: `Reservation` (addresses), `Handle` (memory), `Mapping` (the two joined).
Closing is idempotent. Invariants V1-V9 of DESIGN.md.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import RollplexError
from rollplex_cli.memory.ledger import Ledger
from rollplex_cli.memory.tensors import num_bytes_of, tensor_at

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    import torch

    from rollplex_cli.memory.vmm.base import MemoryDriver


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveResources:
    """What the driver holds for this process: counts by kind, and bytes."""

    reservations: int = 0
    handles: int = 0
    mappings: int = 0
    reserved_bytes: int = 0
    created_bytes: int = 0
    mapped_bytes: int = 0
    """Counts a handle once for every address it is mapped at."""
    retired: int = 0
    """Of the reservations: closed by their owner, kept because a tensor over them is alive."""
    unreleased: int = 0
    """Of the handles: closed by their owner, kept because they are mapped or the driver would not take them."""


class Reservation:
    """A reserved range of addresses. Made by `VirtualMemory.reserve`.

    Attributes:
        address: first byte.
        size: bytes.
    """

    def __init__(self, memory: VirtualMemory, address: int, size: int) -> None:
        self._memory = memory
        self.address = address
        self.size = size
        self.closed = False
        # Sorted by offset; `mappings` has the same keys.
        self._offsets: list[int] = []
        self._mappings: dict[int, Mapping] = {}
        self._num_tensors = 0
        self._on_freed: Callable[[], object] | None = None

    @property
    def mappings(self) -> tuple[Mapping, ...]:
        """Live mappings, by offset."""
        return tuple(self._mappings[offset] for offset in self._offsets)

    def tensor(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A zero-copy contiguous tensor over bytes of this range that are accessible now.

        The address stays reserved as long as the tensor lives, also when the reservation is closed before. Its memory
        does not: using the tensor while the range is unmapped ends the process.

        Raises:
            ValueError: part of the tensor is outside of what is mapped and accessible.
        """
        return self._memory._tensor(self, offset, shape, dtype)

    def close(self, on_freed: Callable[[], object] | None = None) -> None:
        """Give the addresses back, or as soon as no tensor over them lives.

        Args:
            on_freed: called once when they are back with the driver; it must not call this memory.

        Raises:
            ValueError: something is mapped in it.
            DriverCallError: the driver refused; the reservation is as before.
        """
        self._memory._close_reservation(self, on_freed)


class Handle:
    """Allocated memory. Made by `VirtualMemory.create`."""

    def __init__(self, memory: VirtualMemory, raw: int, size: int, owner: str) -> None:
        self._memory = memory
        self._raw = raw
        self.size = size
        self.owner = owner
        self.closed = False
        self._num_mappings = 0

    def close(self) -> None:
        """Give the memory back, or as soon as nothing maps it.

        If the driver refuses, the bytes stay their owner's in the ledger and the next operation tries again.
        """
        self._memory._close_handle(self)


class Mapping:
    """A handle at an address. Made by `VirtualMemory.map`."""

    def __init__(self, reservation: Reservation, offset: int, handle: Handle) -> None:
        self.reservation = reservation
        self.offset = offset
        self.handle = handle
        self.accessible = False
        self.closed = False

    @property
    def address(self) -> int:
        """First byte."""
        return self.reservation.address + self.offset

    @property
    def size(self) -> int:
        """Bytes: those of the handle."""
        return self.handle.size

    def close(self) -> None:
        """Unmap. Waits for nothing: the caller has drained whatever could touch the range.

        Raises:
            DriverCallError: the driver refused; the mapping is as before.
        """
        self.reservation._memory._unmap(self)


class VirtualMemory:
    """One device's virtual memory. Thread-safe.

    Args:
        driver: the primitives; nobody else calls them.
        ledger: where the owner of every handle is entered.
    """

    def __init__(self, driver: MemoryDriver, ledger: Ledger | None = None) -> None:
        self.driver = driver
        self.ledger = Ledger() if ledger is None else ledger
        self._lock = threading.RLock()
        self._reservations: set[Reservation] = set()
        self._handles: set[Handle] = set()
        self._refused: set[Handle] = set()
        # Finalizers run anywhere, also inside of an operation, so they only leave a note here.
        self._dead_tensors: deque[Reservation] = deque()

    def exclusive(self) -> AbstractContextManager[bool]:
        """The lock of this memory, for a caller whose decision spans several operations. Reentrant."""
        return self._lock

    @property
    def granularity(self) -> int:
        """Unit of offsets and sizes in bytes."""
        return self.driver.granularity

    def round_up(self, num_bytes: int) -> int:
        """The next multiple of the granularity."""
        return -(-num_bytes // self.granularity) * self.granularity

    def reserve(self, size: int, alignment: int = 0) -> Reservation:
        """Reserve addresses.

        Args:
            size: a positive multiple of the granularity.
            alignment: a power of two; 0 and anything smaller than the granularity mean the granularity.
        """
        self._check_size(size)
        alignment = max(alignment, self.granularity)
        if alignment & (alignment - 1):
            raise ValueError(f"alignment is a power of two: {alignment}")
        with self._lock:
            self._sweep()
            reservation = Reservation(self, self.driver.reserve(size, alignment), size)
            self._reservations.add(reservation)
            return reservation

    def create(self, size: int, owner: str) -> Handle:
        """Allocate memory for `owner`.

        Raises:
            OutOfMemoryError: wanted, free and held by whom.
        """
        self._check_size(size)
        with self._lock:
            self._sweep()
            handle = Handle(self, self.driver.create(size), size, owner)
            self.ledger.acquire(handle, owner, size)
            self._handles.add(handle)
            return handle

    def map(self, reservation: Reservation, offset: int, handle: Handle) -> Mapping:
        """Join the whole handle to the range at `offset`. It cannot be accessed before `set_access`.

        A handle may be mapped at several places; all show the same bytes.

        Raises:
            ValueError: misaligned, outside of the range, over another mapping, or something is closed.
        """
        with self._lock:
            self._sweep()
            if reservation.closed or handle.closed:
                raise ValueError("a closed reservation or handle cannot be mapped")
            if offset % self.granularity or offset < 0 or offset + handle.size > reservation.size:
                raise ValueError(
                    f"a mapping of {handle.size} bytes at {offset} does not lie in the range: {reservation.size}"
                )
            position = bisect_left(reservation._offsets, offset)
            neighbours = reservation._offsets[max(position - 1, 0) : position + 1]
            for other in neighbours:
                if other < offset + handle.size and offset < other + reservation._mappings[other].size:
                    raise ValueError(f"a mapping at {offset} overlaps another one at: {other}")
            mapping = Mapping(reservation, offset, handle)
            self.driver.map(mapping.address, handle.size, handle._raw)
            reservation._offsets.insert(position, offset)
            reservation._mappings[offset] = mapping
            handle._num_mappings += 1
            return mapping

    def set_access(self, reservation: Reservation, offset: int, size: int) -> None:
        """Allow reads and writes of the bytes [offset, offset + size), which are whole mappings without a gap.

        Raises:
            ValueError: there is a gap, or an end lies inside of a mapping.
        """
        with self._lock:
            self._sweep()
            covered = self._covering(reservation, offset, size)
            if not covered or covered[0].offset != offset or covered[-1].offset + covered[-1].size != offset + size:
                raise ValueError(f"bytes {offset} to {offset + size} are not whole mappings without a gap")
            self.driver.set_access(reservation.address + offset, size)
            for mapping in covered:
                mapping.accessible = True

    def live(self) -> LiveResources:
        """What is held now. Equal before and after anything that cleans up behind itself."""
        with self._lock:
            self._sweep()
            mappings = [mapping for reservation in self._reservations for mapping in reservation._mappings.values()]
            return LiveResources(
                reservations=len(self._reservations),
                handles=len(self._handles),
                mappings=len(mappings),
                reserved_bytes=sum(reservation.size for reservation in self._reservations),
                created_bytes=sum(handle.size for handle in self._handles),
                mapped_bytes=sum(mapping.size for mapping in mappings),
                retired=sum(reservation.closed for reservation in self._reservations),
                unreleased=sum(handle.closed for handle in self._handles),
            )

    def holders(self) -> dict[str, int]:
        """Bytes of handles by owner, after another try to give back those that the driver did not take."""
        with self._lock:
            self._sweep()
            return self.ledger.snapshot().by_owner

    def free_bytes(self) -> int:
        """Bytes the driver could still give, other processes counted; after the same try as `holders`."""
        with self._lock:
            self._sweep()
            return self.driver.free_bytes()

    def total_bytes(self) -> int:
        """Size of the device's memory."""
        with self._lock:
            return self.driver.total_bytes()

    def _check_size(self, size: int) -> None:
        if size <= 0 or size % self.granularity:
            raise ValueError(f"a size is a positive multiple of {self.granularity}: {size}")

    def _covering(self, reservation: Reservation, offset: int, size: int) -> list[Mapping]:
        """The mappings that hold [offset, offset + size), by offset; empty where a byte of it is in none."""
        first = bisect_right(reservation._offsets, offset) - 1
        covered: list[Mapping] = []
        end = offset
        for start in reservation._offsets[max(first, 0) :]:
            mapping = reservation._mappings[start]
            if start > end or end >= offset + size:
                break
            covered.append(mapping)
            end = start + mapping.size
        return covered if covered and end >= offset + size else []

    def _tensor(self, reservation: Reservation, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        with self._lock:
            self._sweep()
            covered = self._covering(reservation, offset, num_bytes_of(shape, dtype)) if offset >= 0 else []
            if not covered or not all(mapping.accessible for mapping in covered):
                raise ValueError(f"a tensor of {tuple(shape)} `{dtype}` is outside of accessible memory at: {offset}")
            on_dead = partial(self._dead_tensors.append, reservation)
            address = reservation.address + offset
            tensor = tensor_at(address, shape, dtype, self.driver.device, on_dead=on_dead)
            reservation._num_tensors += 1
            return tensor

    def _unmap(self, mapping: Mapping) -> None:
        with self._lock:
            if mapping.closed:
                return
            self._sweep()
            self.driver.unmap(mapping.address, mapping.size)
            mapping.closed = True
            mapping.accessible = False
            reservation = mapping.reservation
            del reservation._mappings[mapping.offset]
            reservation._offsets.remove(mapping.offset)
            mapping.handle._num_mappings -= 1
            self._try_release(mapping.handle)

    def _close_handle(self, handle: Handle) -> None:
        with self._lock:
            if not handle.closed:
                self._sweep()
                handle.closed = True
                self._try_release(handle)

    def _try_release(self, handle: Handle) -> None:
        """Give a handle back that nobody needs; one that the driver does not take now is tried again by `_sweep`."""
        if not handle.closed or handle._num_mappings:
            return
        try:
            self.driver.release(handle._raw, handle.size)
        except RollplexError:
            self._refused.add(handle)
            return
        self._refused.discard(handle)
        self._handles.discard(handle)
        self.ledger.release(handle)

    def _close_reservation(self, reservation: Reservation, on_freed: Callable[[], object] | None) -> None:
        with self._lock:
            if reservation.closed:
                return
            self._sweep()
            if reservation._mappings:
                raise ValueError(f"a reservation with mappings cannot be closed: {len(reservation._mappings)} mapped")
            if not reservation._num_tensors:
                self.driver.free(reservation.address, reservation.size)
                self._reservations.discard(reservation)
            reservation.closed = True
            reservation._on_freed = on_freed
            if reservation not in self._reservations and on_freed is not None:
                on_freed()

    def _sweep(self) -> None:
        """Finish what had to wait: dead tensors, retired reservations, handles that were not taken."""
        while self._dead_tensors:
            reservation = self._dead_tensors.popleft()
            reservation._num_tensors -= 1
            if reservation.closed and not reservation._num_tensors:
                self._free_retired(reservation)
        for handle in tuple(self._refused):
            self._try_release(handle)

    def _free_retired(self, reservation: Reservation) -> None:
        try:
            self.driver.free(reservation.address, reservation.size)
        except RollplexError:
            # Addresses without memory: better kept than failing an operation that has nothing to do with them.
            return
        self._reservations.discard(reservation)
        if reservation._on_freed is not None:
            reservation._on_freed()
