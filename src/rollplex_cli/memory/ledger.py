"""Who holds how many bytes. Pure bookkeeping, without a driver and without PyTorch."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import RunFailedError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping


@dataclass(frozen=True, slots=True)
class LedgerSnapshot:
    """Bytes by owner at one moment; owners of nothing are left out."""

    by_owner: dict[str, int] = field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """Sum over all owners."""
        return sum(self.by_owner.values())

    def changes_to(self, later: LedgerSnapshot) -> dict[str, int]:
        """Bytes gained (positive) or given back (negative) by each owner between this moment and a later one."""
        owners = sorted(self.by_owner.keys() | later.by_owner.keys())
        changes = {owner: later.by_owner.get(owner, 0) - self.by_owner.get(owner, 0) for owner in owners}
        return {owner: change for owner, change in changes.items() if change}


class Ledger:
    """Every block of memory has one owner and one size. Thread-safe.

    A block is anything that can be told from others while it lives: a handle, a buffer. Invariants L1-L4 of
    DESIGN.md.
    """

    def __init__(self) -> None:
        # Guarded by `_lock`; `_totals` is always the sum of `_blocks`.
        self._lock = threading.Lock()
        self._blocks: dict[Hashable, tuple[str, int]] = {}
        self._totals: Counter[str] = Counter()
        self._total_bytes = 0

    def acquire(self, block: Hashable, owner: str, num_bytes: int) -> None:
        """Enter a block.

        Raises:
            ValueError: the block has an owner already, or no bytes.
        """
        with self._lock:
            if block in self._blocks:
                raise ValueError(f"a block of `{owner}` has an owner already: `{self._blocks[block][0]}`")
            if num_bytes <= 0:
                raise ValueError(f"a block of `{owner}` has at least one byte: {num_bytes}")
            self._blocks[block] = (owner, num_bytes)
            self._totals[owner] += num_bytes
            self._total_bytes += num_bytes

    def release(self, block: Hashable) -> None:
        """Strike a block out.

        Raises:
            ValueError: nobody owns it, or not any more.
        """
        with self._lock:
            if block not in self._blocks:
                raise ValueError(f"released twice or never acquired: {block!r}")
            owner, num_bytes = self._blocks.pop(block)
            self._totals[owner] -= num_bytes
            self._total_bytes -= num_bytes
            if not self._totals[owner]:
                del self._totals[owner]

    def held_by(self, owner: str) -> int:
        """Bytes of one owner."""
        with self._lock:
            return self._totals[owner]

    @property
    def total_bytes(self) -> int:
        """Bytes of all owners."""
        with self._lock:
            return self._total_bytes

    def snapshot(self) -> LedgerSnapshot:
        """Bytes by owner now."""
        with self._lock:
            return LedgerSnapshot({owner: size for owner, size in sorted(self._totals.items()) if size})

    def check(self, driver_bytes: int) -> None:
        """Compare with an independent count of the same memory.

        Raises:
            RunFailedError: they differ; the message lists every owner.
        """
        held = self.snapshot()
        if held.total_bytes != driver_bytes:
            owners = describe(held.by_owner)
            raise RunFailedError(
                f"the ledger has {held.total_bytes} bytes ({owners}), the driver counts: {driver_bytes}"
            )


def describe(by_owner: Mapping[str, int]) -> str:
    """Owners with their bytes in one line, largest first: `weights` 1024, `rollout_kv` 512."""
    rows = sorted(by_owner.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"`{owner}` {size}" for owner, size in rows) or "nobody holds any"
