"""Parts of a region without memory. Numbers are the invariants of memory/DESIGN.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollplex_cli.core.units import MIB
from rollplex_cli.memory import crash, holes
from rollplex_cli.memory.manager import MemoryManager
from rollplex_cli.memory.regions import Content, RegionError, RegionState
from rollplex_cli.memory.vmm.base import DriverCallError, OutOfMemoryError

UNIT = 2 * MIB
"""A multiple of both drivers' granularity."""


@pytest.fixture
def manager(driver: Any) -> MemoryManager:
    return MemoryManager(driver, budget_bytes=64 * MIB, host_budget_bytes=0)


def punched_region(manager: MemoryManager, *ranges: tuple[int, int], units: int = 8) -> Any:
    region = manager.region("snapshot", units * UNIT, handle_bytes=2 * UNIT)
    region.place("all", (units * UNIT // 4,), torch.float32)
    holes.cut(region, ranges)
    manager.map("snapshot")
    return region


def test_the_rest_keeps_its_bytes_and_its_addresses(manager: MemoryManager) -> None:  # H1
    region = punched_region(manager, (UNIT, 2 * UNIT), (5 * UNIT, UNIT))
    tensor = region.tensor("all")
    tensor.copy_(torch.arange(len(tensor), dtype=torch.float32))
    manager.punch("snapshot", after="decode")
    assert manager.usage().regions == {"snapshot": 5 * UNIT}
    assert region.state is RegionState.MAPPED
    words = UNIT // 4
    kept = [*range(words), *range(3 * words, 3 * words + 5), *range(6 * words, 6 * words + 5)]
    assert tensor[kept].tolist() == kept
    gone = crash.explain(region.address + 5 * UNIT)
    assert gone is not None and gone.endswith("is in region `snapshot`, unmapped after decode")
    assert crash.explain(region.address) is None
    manager.fill("snapshot")
    assert manager.usage().regions == {"snapshot": 8 * UNIT}
    assert crash.explain(region.address + 5 * UNIT) is None
    tensor.fill_(2)
    assert float(tensor[words]) == 2
    del tensor
    manager.close_region("snapshot")


def test_only_whole_pages_become_holes(manager: MemoryManager) -> None:
    unit = manager.memory.granularity
    region = manager.region("snapshot", 8 * unit)
    assert holes.cut(region, [(unit // 2, unit), (4 * unit - 8, unit + 16)]) == unit
    assert region._holes == [(4 * unit, unit)]
    assert holes.cut(region, [(0, unit), (unit, unit)]) == 2 * unit
    manager.close_region("snapshot")


def test_wrong_states_and_ranges_are_refused(manager: MemoryManager) -> None:
    region = punched_region(manager, (0, UNIT))
    with pytest.raises(RegionError, match="holes of `snapshot` are not open"):
        manager.fill("snapshot")
    manager.punch("snapshot", after="decode")
    with pytest.raises(RegionError, match="holes of `snapshot` are open"):
        manager.punch("snapshot", after="decode")
    manager.unmap("snapshot", after="all")
    with pytest.raises(RegionError, match="be filled"):
        manager.fill("snapshot")
    manager.map("snapshot")
    assert not region.punched
    with pytest.raises(RegionError, match="be cut"):
        holes.cut(region, [(0, UNIT)])
    manager.close_region("snapshot")
    small = manager.region("small", UNIT)
    with pytest.raises(ValueError, match="not in `small`"):
        holes.cut(small, [(UNIT, UNIT)])
    manager.close_region("small")
    kept = MemoryManager(manager.memory.driver, budget_bytes=MIB * 8, host_budget_bytes=MIB * 8)
    constant = kept.region("constant", UNIT, content=Content.CONSTANT)
    with pytest.raises(ValueError, match="keeps its content"):
        holes.cut(constant, [(0, UNIT)])
    kept.close_region("constant")


def test_no_room_to_fill_changes_nothing(driver: Any) -> None:  # H2
    manager = MemoryManager(driver, budget_bytes=8 * UNIT, host_budget_bytes=0)
    punched_region(manager, (0, 4 * UNIT))
    manager.punch("snapshot", after="decode")
    manager.region("gradients", 3 * UNIT)
    manager.map("gradients")
    with pytest.raises(OutOfMemoryError, match="`snapshot` within `memory.budget_gib`"):
        manager.fill("snapshot")
    manager.check()
    manager.unmap("gradients", after="update")
    manager.fill("snapshot")
    manager.close_region("snapshot")
    manager.close_region("gradients")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.tuples(st.integers(0, 7), st.integers(1, 3)), max_size=4),
    moves=st.lists(st.tuples(st.sampled_from(["punch", "fill", "map", "unmap"]), st.integers(0, 9)), max_size=10),
)
def test_the_ledger_is_the_drivers_count_whatever_fails(  # H3
    new_driver: Any, cuts: list[tuple[int, int]], moves: list[tuple[str, int]]
) -> None:
    driver = new_driver()
    manager = MemoryManager(driver, budget_bytes=64 * MIB, host_budget_bytes=0)
    region = punched_region(manager, *((at * UNIT, min(size, 8 - at) * UNIT) for at, size in cuts))
    open_bytes = sum(size for _, size in region._holes)
    for name, fail_in in moves:
        before = (region.state, region.punched, driver.created_bytes)
        driver.fail_in, driver.fail_times = fail_in, 1
        move = getattr(manager, name)
        try:
            move("snapshot", **({"after": "a move"} if name in ("punch", "unmap") else {}))
        except (RegionError, DriverCallError, OutOfMemoryError):
            driver.fail_in = 0
            assert (region.state, region.punched, driver.created_bytes) == before
        driver.fail_in = 0
        manager.check()
        whole = 8 * UNIT if region.state is RegionState.MAPPED else 0
        expected = whole - (open_bytes if region.punched else 0)
        assert driver.created_bytes == manager.usage().used_bytes == expected
    manager.close_region("snapshot")
