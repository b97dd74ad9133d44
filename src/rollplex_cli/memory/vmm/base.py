"""What a memory driver does, and how it fails.

A driver knows nothing of owners, overlap or order: `space.VirtualMemory` holds those rules once for all drivers and
calls these primitives only with arguments that obey them.
"""

from __future__ import annotations

from typing import Protocol

from rollplex_cli.core.errors import DoesNotFitError, RunFailedError
from rollplex_cli.core.units import format_bytes


class OutOfMemoryError(DoesNotFitError):
    """The device, the machine or a budget has fewer bytes than were wanted.

    Args:
        what: who wanted them, a phrase that starts the message.
        wanted_bytes: what was asked for.
        free_bytes: what there was.
        holders: bytes by owner of what is in use, for the message.
        hint: what to do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        wanted_bytes: int,
        free_bytes: int,
        holders: dict[str, int] | None = None,
        hint: str | None = None,
    ) -> None:
        parts = [f"{what} wants {format_bytes(wanted_bytes)} and {format_bytes(max(free_bytes, 0))} are free"]
        held = sorted((holders or {}).items(), key=lambda item: (-item[1], item[0]))
        if held:
            parts.append("held by " + ", ".join(f"`{name}` {format_bytes(size)}" for name, size in held))
        super().__init__("; ".join(parts), hint=hint)
        self.what = what
        self.wanted_bytes = wanted_bytes
        self.free_bytes = free_bytes
        self.holders = dict(held)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (self.what, self.wanted_bytes, self.free_bytes, self.holders, self.hint))


def _rebuild(what: str, wanted: int, free: int, holders: dict[str, int], hint: str | None) -> OutOfMemoryError:
    return OutOfMemoryError(what, wanted_bytes=wanted, free_bytes=free, holders=holders, hint=hint)


class DriverCallError(RunFailedError):
    """A call that the driver refused for another reason than memory.

    Args:
        call: name of the driver's function.
        reason: the driver's own name or text of the fault.
    """

    def __init__(self, call: str, reason: str, *, hint: str | None = None) -> None:
        super().__init__(f"`{call}` failed: {reason}", hint=hint)
        self.call = call
        self.reason = reason

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_call, (self.call, self.reason, self.hint))


def _rebuild_call(call: str, reason: str, hint: str | None) -> DriverCallError:
    return DriverCallError(call, reason, hint=hint)


class MemoryDriver(Protocol):
    """The primitives of one device. Addresses and sizes are bytes, multiples of `granularity`.

    Every method either does the whole operation or raises and does none of it. Methods may be called from any thread,
    one at a time; `pin` and `unpin` also beside others.
    """

    @property
    def device(self) -> str:
        """The PyTorch device of tensors over this memory: `cpu` or `cuda:N`."""

    @property
    def granularity(self) -> int:
        """The unit of addresses and sizes; a power of two."""

    @property
    def zeroes_new_memory(self) -> bool:
        """Whether pages that were just created read as zero."""

    def reserve(self, size: int, alignment: int) -> int:
        """Reserve `size` bytes of addresses at a multiple of `alignment`; they cannot be accessed. Gives the address.

        Raises:
            DriverCallError: no such range.
        """

    def free(self, address: int, size: int) -> None:
        """Give back a whole reserved range, in which nothing is mapped."""

    def create(self, size: int) -> int:
        """Allocate `size` bytes of memory, now and not on first use. Gives a handle, which is no address.

        Raises:
            OutOfMemoryError: wanted and free bytes.
        """

    def release(self, handle: int, size: int) -> None:
        """Give the memory of a handle back. Nothing maps it."""

    def map(self, address: int, size: int, handle: int) -> None:
        """Map the whole handle at `address`, inside a reserved range. It cannot be accessed yet."""

    def set_access(self, address: int, size: int) -> None:
        """Allow reads and writes of a range of whole mappings."""

    def unmap(self, address: int, size: int) -> None:
        """Undo one `map`: the range is reserved and cannot be accessed. Does not wait for anything on the device."""

    def free_bytes(self) -> int:
        """Bytes that `create` could still give, as the driver sees them (other processes counted)."""

    def total_bytes(self) -> int:
        """Size of the memory."""

    def pin(self, address: int, size: int) -> None:
        """Lock a range of host memory so that the device can copy to and from it at full speed.

        Raises:
            DriverCallError: the system does not let this process lock that much.
        """

    def unpin(self, address: int) -> None:
        """Undo `pin` of the range that starts at `address`."""

    def close(self) -> None:
        """Let go of the device. Idempotent."""
