from __future__ import annotations

import gc
import sys
import types

import pytest

from rollplex_cli.core.imports import MANY, without_collector


@pytest.mark.parametrize("count", [MANY, 1])
def test_what_was_loaded_is_left_out_where_it_is_much(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = gc.get_freeze_count()
    with without_collector():
        assert not gc.isenabled()
        for number in range(count):
            monkeypatch.setitem(sys.modules, f"loaded{number}", types.ModuleType(f"loaded{number}"))
    assert gc.isenabled()
    left_out = not any(thing is sys.modules["loaded0"] for thing in gc.get_objects())
    assert left_out == (count == MANY)
    assert (gc.get_freeze_count() > frozen) == (count == MANY)


def test_the_outermost_counts() -> None:
    with without_collector():
        with without_collector():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_failed_import_leaves_it_on() -> None:
    with pytest.raises(ImportError), without_collector():
        raise ImportError
    assert gc.isenabled()


def test_where_it_is_off_it_stays_off() -> None:
    gc.disable()
    try:
        with without_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
