"""Parts of a region that lose their memory while the rest keeps it, at addresses that stay.

For tensors of which a rank needs only some rows most of the time: the pages that lie wholly in the others can go.
Invariants H1-H3 of DESIGN.md.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from rollplex_cli.memory.regions import Content, Region, RegionError, RegionState, out_of_memory
from rollplex_cli.memory.vmm.base import OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterable


def cut(region: Region, ranges: Iterable[tuple[int, int]]) -> int:
    """Decide which bytes may go, before the region is mapped for the first time; returns how many.

    Args:
        region: UNMAPPED, with undefined content: what a hole held is not kept.
        ranges: (offset, size) in bytes. Whole pages in them become holes; neighbours are joined first.

    Raises:
        RegionError: the region is mapped.
        ValueError: its content is kept, or a range leaves it.
    """
    if region.content is not Content.UNDEFINED:
        raise ValueError(f"`{region.name}` keeps its content and can have no holes: `{region.content}`")
    unit = region.memory.granularity
    holes = []
    for start, stop in _joined(ranges):
        if start < 0 or stop > region.size_bytes:
            raise ValueError(f"bytes {start} to {stop} are not in `{region.name}`, which has: {region.size_bytes}")
        first, last = -(-start // unit) * unit, stop // unit * unit
        if first < last:
            holes.append((first, last))
    with region.memory.exclusive():
        region.require(RegionState.UNMAPPED, "be cut")
        region._pieces, region._holes = [], []
        end = 0
        for first, last in [*holes, (region.size_bytes, region.size_bytes)]:
            region._pieces += _steps(end, first, region.handle_bytes)
            if first < last:
                inside = _steps(first, last, region.handle_bytes)
                region._pieces += inside
                region._holes += inside
            end = last
    return region.hole_bytes


def punch(region: Region, after: str) -> None:
    """Drain, and give the memory of the holes back, or change nothing.

    Raises:
        RegionError: the region is not MAPPED whole.
    """
    _require(region, punched=False)
    region._drain()
    with region.memory.exclusive():
        _require(region, punched=False)
        inside = {offset for offset, _ in region._holes}
        try:
            with ExitStack() as undo:
                gone = [mapping for mapping in region._reservation.mappings if mapping.offset in inside]
                for mapping in reversed(gone):
                    mapping.close()
                    undo.callback(region._reattach, mapping.offset, mapping.handle)
                undo.pop_all()
            region._why_unmapped = f"unmapped after {after}"
            for mapping in gone:
                region._handles.remove(mapping.handle)
                mapping.handle.close()
        finally:
            region._settle()


def fill(region: Region) -> None:
    """Give the holes memory again, with undefined content, or change nothing.

    Raises:
        OutOfMemoryError: wanted, free and held by whom.
        RegionError: the holes are not open.
    """
    with region.memory.exclusive():
        _require(region, punched=True)
        try:
            with ExitStack() as undo:
                region._attach_pieces(region._holes, undo)
                for start, stop in _joined(region._holes):
                    region.memory.set_access(region._reservation, start, stop - start)
                undo.pop_all()
        except OutOfMemoryError as error:
            raise out_of_memory(region.memory, [region]) from error
        finally:
            region._settle()


def _require(region: Region, *, punched: bool) -> None:
    region.require(RegionState.MAPPED, "be filled" if punched else "be punched")
    if region.punched is not punched:
        raise RegionError(f"the holes of `{region.name}` are {'open' if region.punched else 'not open'}")


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(start, stop) of (offset, size) ranges, ascending, neighbours and overlaps joined."""
    joined: list[tuple[int, int]] = []
    for offset, size in sorted(ranges):
        if joined and offset <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], offset + size))
        else:
            joined.append((offset, offset + size))
    return joined


def _steps(start: int, stop: int, step: int) -> list[tuple[int, int]]:
    return [(at, min(step, stop - at)) for at in range(start, stop, step)]
