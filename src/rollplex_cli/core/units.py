"""Numbers as people read them. Inside the program bytes are bytes and seconds are seconds."""

from __future__ import annotations

import re

KIB = 1024
MIB = 1024**2
GIB = 1024**3


def format_bytes(num_bytes: int | float) -> str:
    """Bytes in the largest binary unit that keeps the number at 1 or above: `1.5 GiB`, `12 B`."""
    sign = "-" if num_bytes < 0 else ""
    size = abs(num_bytes)
    for unit, factor in (("TiB", 1024**4), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if size >= factor:
            return f"{sign}{size / factor:.1f} {unit}"
    return f"{sign}{size:.0f} B"


def format_count(count: int | float) -> str:
    """A count in decimal units: `734.0 k`, `8.3 B`; below 1000 it is printed whole."""
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(count) >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count:.0f}"


def format_seconds(seconds: float) -> str:
    """A duration: `0.35 s`, `12.0 s`, `3 min 05 s`, `2 h 07 min`."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def parse_time_limit(text: str) -> int | None:
    """Seconds of a time limit as Slurm writes it; None for `UNLIMITED` and anything else that is no limit.

    `minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours`, `days-hours:minutes`,
    `days-hours:minutes:seconds`.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text.strip())
    if found is None:
        return None
    days, first, second, third = (int(part) if part is not None else None for part in found.groups())
    if days is not None or third is not None:
        hours, minutes, seconds = first or 0, second or 0, third or 0
    else:
        hours, minutes, seconds = 0, first or 0, second or 0
    return ((days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds
