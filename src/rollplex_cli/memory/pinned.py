"""Host memory that a device copies to and from at full speed, within a budget."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import DoesNotFitError
from rollplex_cli.core.units import format_bytes
from rollplex_cli.memory.ledger import Ledger
from rollplex_cli.memory.tensors import host_buffer
from rollplex_cli.memory.vmm.base import DriverCallError, OutOfMemoryError

if TYPE_CHECKING:
    import torch

    from rollplex_cli.memory.vmm.base import MemoryDriver

_BUDGET_HINT = "raise `memory.host_budget_gib`, or keep less on the host"


class PinnedBuffer:
    """Pinned host memory with one owner. Made by `HostMemory.allocate`.

    Attributes:
        num_bytes: size.
    """

    def __init__(self, memory: HostMemory, tensor: torch.Tensor) -> None:
        self._memory = memory
        self._tensor: torch.Tensor | None = tensor
        self.num_bytes = tensor.numel()

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes, shape (num_bytes,), uint8.

        Raises:
            ValueError: the buffer is closed.
        """
        if self._tensor is None:
            raise ValueError("a closed buffer has no tensor")
        return self._tensor

    def close(self) -> None:
        """Unpin; the memory goes back with the last tensor over it. Idempotent.

        The caller has drained the streams that copy to or from it.

        Raises:
            DriverCallError: the driver refused; the buffer is as before.
        """
        self._memory._close(self)


class HostMemory:
    """All host memory that Rollplex pins in this process. Thread-safe.

    Args:
        driver: the device that copies.
        budget_bytes: upper bound of the sum of all buffers.
    """

    def __init__(self, driver: MemoryDriver, budget_bytes: int) -> None:
        self._driver = driver
        self.budget_bytes = budget_bytes
        self.ledger = Ledger()
        self._lock = threading.RLock()
        # Strong references: memory that went away while pinned would leave the device a range that is not there.
        self._open: set[PinnedBuffer] = set()
        self._dead: deque[object] = deque()

    def allocate(self, owner: str, num_bytes: int) -> PinnedBuffer:
        """Zeroed pinned memory.

        Raises:
            OutOfMemoryError: over the budget, or the machine has no such memory; wanted, free and held by whom.
            DoesNotFitError: the system does not let this process pin it.
        """
        with self._lock:
            self._sweep()
            free = self.budget_bytes - self.ledger.total_bytes
            if num_bytes > free:
                raise self._too_much(owner, num_bytes, free)
            block = object()
            try:
                tensor = host_buffer(num_bytes, on_dead=partial(self._dead.append, block))
            except OSError as error:
                raise self._too_much(owner, num_bytes, 0) from error
            # Entered first: if pinning fails, the buffer dies and is struck out like any other.
            self.ledger.acquire(block, owner, num_bytes)
            try:
                self._driver.pin(tensor.data_ptr(), num_bytes)
            except DriverCallError as error:
                # Else the traceback of the error would keep the memory as long as somebody keeps the error.
                del tensor
                raise DoesNotFitError(
                    f"`{owner}` wants {format_bytes(num_bytes)} of pinned host memory, and it cannot be pinned: "
                    f"{error.reason}",
                    hint="raise `ulimit -l`, or lower `memory.host_budget_gib`",
                ) from error
            buffer = PinnedBuffer(self, tensor)
            self._open.add(buffer)
            return buffer

    def holders(self) -> dict[str, int]:
        """Bytes by owner."""
        with self._lock:
            self._sweep()
            return self.ledger.snapshot().by_owner

    @property
    def held_bytes(self) -> int:
        """Sum over all owners."""
        with self._lock:
            self._sweep()
            return self.ledger.total_bytes

    def _too_much(self, owner: str, wanted: int, free: int) -> OutOfMemoryError:
        return OutOfMemoryError(
            f"`{owner}` on the host",
            wanted_bytes=wanted,
            free_bytes=free,
            holders=self.ledger.snapshot().by_owner,
            hint=_BUDGET_HINT,
        )

    def _close(self, buffer: PinnedBuffer) -> None:
        with self._lock:
            if buffer._tensor is not None:
                self._driver.unpin(buffer._tensor.data_ptr())
                buffer._tensor = None
                self._open.discard(buffer)
            self._sweep()

    def _sweep(self) -> None:
        while self._dead:
            self.ledger.release(self._dead.popleft())
