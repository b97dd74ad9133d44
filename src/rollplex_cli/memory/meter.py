"""What was in memory at most, phase by phase, and the cap of PyTorch's allocator that follows from it.

Between two changes of residency the regions are constant, so the peak of such an interval is regions + PyTorch's own
peak + everything else that the driver counts. The peak of a phase is the largest of its intervals: no sampling in
time, nothing missed between samples.
"""

from __future__ import annotations

import ctypes
import resource
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rollplex_cli.memory.manager import MemoryManager, ResidencyChange

PYTORCH = "pytorch"
CONTEXT = "context_and_graphs"
"""Names of what is reported to the manager from outside of regions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseMemory:
    """One phase of one rank, in bytes."""

    objects: dict[str, int] = field(default_factory=dict)
    """Peak of each region, of what PyTorch gave out, and of context and graphs; not all at the same moment."""
    peak_bytes: int = 0
    """Largest sum of them at one moment."""
    driver_peak_bytes: int = 0
    """The same with what PyTorch held instead of what it gave out: what the driver counted."""
    regions: dict[str, int] = field(default_factory=dict)
    """Mapped now, at the end of the phase."""
    torch_bytes: int = 0
    """Given out by PyTorch now; on a CPU the bytes of the C heap in use, which its tensors are part of."""
    pinned_bytes: int = 0
    rss_bytes: int = 0
    """Resident size of the process."""


class PhaseMeter:
    """Follows one manager. Thread-safe; `changed` is the manager's `on_change`.

    Args:
        manager: of a device whose PyTorch memory is reported here as `pytorch`, and the rest of what the driver counts
            as `context_and_graphs` (other processes on the same device included).
        capped: whether PyTorch's allocator may have only what the budget leaves it.
    """

    def __init__(self, manager: MemoryManager, *, capped: bool = False) -> None:
        self._manager = manager
        self._device = torch.device(manager.memory.driver.device)
        self._cuda = self._device.type == "cuda"
        self._capped = capped and self._cuda
        self._lock = threading.Lock()
        if self._cuda:
            torch.cuda.init()
            manager.report(PYTORCH, self._reserved)
            manager.report(CONTEXT, self._context)
            manager.add_reclaimer(torch.cuda.empty_cache)
        self._regions = manager.memory.holders()
        self._objects: dict[str, int] = {}
        self._peak = self._driver_peak = 0
        self._longest = (0, 0)
        self._cap()

    def changed(self, _change: ResidencyChange | None = None) -> None:
        """Regions were mapped or unmapped."""
        with self._lock:
            self._close_interval()
        self._cap()

    def end_phase(self) -> PhaseMemory:
        """What was measured since the last call."""
        with self._lock:
            self._close_interval()
            measured = PhaseMemory(
                objects=dict(sorted(self._objects.items())),
                peak_bytes=self._peak,
                driver_peak_bytes=self._driver_peak,
                regions=dict(self._regions),
                torch_bytes=torch.cuda.memory_allocated(self._device) if self._cuda else heap_bytes(),
                pinned_bytes=self._manager.host.held_bytes,
                rss_bytes=rss_bytes(),
            )
            self._objects, self._peak, self._driver_peak = {}, 0, 0
        return measured

    def take_peaks(self) -> tuple[int, int]:
        """The most that was given out since the last call, over any number of phases, and the most that the driver
        counted, in which PyTorch's cache of earlier work is."""
        with self._lock:
            self._close_interval()
            longest, self._longest = self._longest, (0, 0)
        return longest

    def _close_interval(self) -> None:
        """Take in the interval that ends now, in which `_regions` were mapped."""
        inside = dict(self._regions)
        total, driver = sum(inside.values()), sum(inside.values())
        if self._cuda:
            inside[PYTORCH] = torch.cuda.max_memory_allocated(self._device)
            inside[CONTEXT] = self._context()
            total += inside[PYTORCH] + inside[CONTEXT]
            driver += torch.cuda.max_memory_reserved(self._device) + inside[CONTEXT]
            torch.cuda.reset_peak_memory_stats(self._device)
        self._peak, self._driver_peak = max(self._peak, total), max(self._driver_peak, driver)
        self._longest = (max(self._longest[0], total), max(self._longest[1], driver))
        for name, size in inside.items():
            self._objects[name] = max(self._objects.get(name, 0), size)
        self._regions = self._manager.memory.holders()

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def _context(self) -> int:
        memory = self._manager.memory
        used = memory.total_bytes() - memory.free_bytes()
        return max(0, used - memory.ledger.total_bytes - self._reserved())

    def _cap(self) -> None:
        if not self._capped:
            return
        memory = self._manager.memory
        context = self._context()  # first: it may shrink what the ledger has
        left = self._manager.budget_bytes - memory.ledger.total_bytes - context
        torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, left / memory.total_bytes())), self._device)


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def heap_bytes() -> int:
    """Bytes of the C heap in use, over all its arenas and mapped blocks; 0 where the C library does not tell."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _MallInfo
    info = mallinfo2()
    return int(info.uordblks) + int(info.hblkhd)


def trim_heap() -> None:
    """Give what the C heap has free back to the system; elsewhere than on glibc nothing happens.

    glibc reuses few of the aligned blocks that PyTorch frees: measured on the CPU, the tiny job grew by 5 MiB a step
    without end (glibc 2.36), nearly all of it free and given back by this.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def rss_bytes() -> int:
    """Resident size of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
