"""Loading large libraries without what loading them does not need."""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

MANY = 100
"""New modules from which on what is alive is worth leaving out of later collections."""


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Around imports: the cyclic collector rests, and what is alive after many of them is left out of its later passes.

    A module holds what it defines for the life of the process, so there is nothing to collect, yet the collector walks
    all of it again and again: a third of the CPU seconds in which a rank imports its engines, and a few hundred
    milliseconds at every full collection of a run. Call it before anything large is built, which would be left out,
    too. Nested, the outermost counts; does nothing where the collector is off already.
    """
    if not gc.isenabled():
        yield
        return
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) >= before + MANY:
            gc.freeze()
        gc.enable()
