"""Budgets, sets of regions and threads. Numbers are the invariants of memory/DESIGN.md."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rollplex_cli.core.errors import RollplexError, RunFailedError
from rollplex_cli.core.units import MIB
from rollplex_cli.memory.manager import MemoryManager, ResidencyChange
from rollplex_cli.memory.regions import Content, RegionError, RegionState
from rollplex_cli.memory.vmm.base import DriverCallError, OutOfMemoryError


@pytest.fixture
def changes() -> list[ResidencyChange]:
    return []


@pytest.fixture
def manager(driver: Any, changes: list[ResidencyChange]) -> Iterator[MemoryManager]:
    manager = MemoryManager(driver, budget_bytes=32 * MIB, host_budget_bytes=32 * MIB, on_change=changes.append)
    yield manager
    driver.failing = frozenset()
    manager.check()
    for name in list(manager._regions):
        manager.close_region(name)
    manager.check()
    assert manager.usage().used_bytes == sum(manager.usage().external.values())


def test_the_budget_counts_regions_and_reports_and_names_everybody(manager: MemoryManager) -> None:  # M5
    reserved = 6 * MIB
    manager.report("torch", lambda: reserved)
    manager.report("context", 2 * MIB)
    manager.region("weights", 10 * MIB)
    manager.region("rollout_kv", 16 * MIB)
    manager.map("weights")
    with pytest.raises(OutOfMemoryError) as caught:
        manager.map("rollout_kv")
    assert caught.value.message == (
        "`rollout_kv` within `memory.budget_gib` wants 16.0 MiB and 14.0 MiB are free; "
        "held by `weights` 10.0 MiB, `torch` 6.0 MiB, `context` 2.0 MiB"
    )
    assert caught.value.exit_code == 3
    assert "profile-memory" in (caught.value.hint or "")
    assert manager.get("rollout_kv").state is RegionState.UNMAPPED
    reserved = 4 * MIB
    manager.map("rollout_kv")
    assert manager.usage().free_bytes == 0


def test_reports_may_exceed_the_budget_but_nothing_is_mapped_then(manager: MemoryManager) -> None:
    manager.report("torch", 40 * MIB)
    manager.region("weights", 2 * MIB)
    assert manager.usage().free_bytes == -8 * MIB
    with pytest.raises(OutOfMemoryError, match=r"wants 2\.0 MiB and 0 B are free"):
        manager.map("weights")


def test_a_region_larger_than_the_budget_is_refused_when_it_is_made(manager: MemoryManager) -> None:
    with pytest.raises(OutOfMemoryError, match=r"`rollout_kv` .* wants 34\.0 MiB and 32\.0 MiB are free"):
        manager.region("rollout_kv", 34 * MIB)
    assert manager.memory.live().reservations == 0


def test_cached_blocks_are_reclaimed_before_a_map_fails(manager: MemoryManager) -> None:  # M6
    cached = [30 * MIB]
    manager.report("torch", lambda: cached[0])
    manager.add_reclaimer(lambda: cached.__setitem__(0, MIB))
    manager.region("weights", 10 * MIB)
    manager.map("weights")
    assert manager.usage().external == {"torch": MIB}


def test_a_set_is_mapped_whole_or_not_at_all(manager: MemoryManager) -> None:  # M7
    for name, size in (("a", 12), ("b", 12), ("c", 12)):
        manager.region(name, size * MIB)
    with pytest.raises(OutOfMemoryError, match=r"`a`, `b`, `c` within .* wants 36\.0 MiB"):
        manager.map("a", "b", "c")
    assert manager.usage().regions == {}
    manager.map("a", "b")
    with pytest.raises(RegionError, match="`b` cannot be mapped"):
        manager.map("c", "b")
    with pytest.raises(RegionError, match="`c` cannot be unmapped"):
        manager.unmap("a", "c", after="x")
    with pytest.raises(ValueError, match="no such region: `d`"):
        manager.unmap("a", "d", after="x")
    with pytest.raises(ValueError, match="distinct"):
        manager.unmap("a", "a", after="x")
    assert manager.usage().regions == {"a": 12 * MIB, "b": 12 * MIB}
    manager.unmap("a", "b", after="x")
    assert manager.usage().regions == {}


def test_a_full_device_under_a_free_budget_names_reports_too(manager: MemoryManager, driver: Any) -> None:
    manager.report("context", MIB)
    manager.region("weights", 2 * MIB)
    driver.failing = frozenset({"create"})
    with pytest.raises(OutOfMemoryError, match=r"`weights` on `.*`; held by `context` 1\.0 MiB|held by `context`"):
        manager.map("weights")
    driver.failing = frozenset()
    manager.map("weights")


def test_names_are_unique_over_regions_and_reports(manager: MemoryManager) -> None:
    manager.region("weights", 2 * MIB)
    manager.report("torch", 1)
    for name in ("weights", "torch"):
        with pytest.raises(ValueError, match=f"exists: `{name}`"):
            manager.region(name, 2 * MIB)
    with pytest.raises(ValueError, match="a region has this name: `weights`"):
        manager.report("weights", 1)
    manager.close_region("weights")
    manager.region("weights", 4 * MIB)


def test_peak_is_the_largest_moment_with_its_holders(manager: MemoryManager) -> None:
    manager.region("weights", 10 * MIB)
    manager.region("gradients", 20 * MIB)
    manager.map("weights")
    manager.map("gradients")
    manager.unmap("gradients", after="update")
    peak = manager.peak(reset=True)
    assert peak.regions == {"weights": 10 * MIB, "gradients": 20 * MIB}
    assert manager.peak().regions == {"weights": 10 * MIB}


def test_changes_are_told_in_order_with_bytes_and_reason(
    manager: MemoryManager, changes: list[ResidencyChange]
) -> None:
    manager.region("weights", 2 * MIB)
    manager.map("weights")
    manager.unmap("weights", after="actor_prefix_backward[2]")
    told = [(change.mapped, change.regions, change.num_bytes, change.after, change.used_bytes) for change in changes]
    assert told == [
        (True, ("weights",), 2 * MIB, "", 2 * MIB),
        (False, ("weights",), 2 * MIB, "actor_prefix_backward[2]", 0),
    ]
    assert all(change.seconds >= 0 for change in changes)


@pytest.mark.parametrize("fail_in", range(1, 9))
def test_after_a_failure_at_any_primitive_usage_is_what_the_driver_holds(
    manager: MemoryManager, driver: Any, fail_in: int
) -> None:  # V7, R6
    unit = manager.memory.granularity
    region = manager.region("weights", 5 * unit, content=Content.SAVED, handle_bytes=4 * unit)
    region.place("w", (region.size_bytes,), torch.uint8)
    manager.map("weights")
    driver.fail_in = fail_in
    failed = False
    try:
        manager.host.allocate("masters", unit).close()
        manager.unmap("weights", after="x")
    except RollplexError:
        failed = True
    assert failed is (fail_in <= 5)  # pin, unpin, pin, 2 unmap; then 2 release, of which a refused one is tried again
    driver.fail_in = 0
    for buffer in tuple(manager.host._open):
        buffer.close()  # the one that could not be unpinned
    held = {"weights": region.size_bytes} if failed else {}
    assert manager.usage().regions == held
    assert driver.created_bytes == sum(held.values())
    assert region.state is (RegionState.MAPPED if failed else RegionState.UNMAPPED)


def test_bytes_that_the_driver_takes_late_are_counted_until_then_and_no_longer(
    manager: MemoryManager, driver: Any, changes: list[ResidencyChange]
) -> None:  # V7
    for name in ("weights", "gradients"):
        manager.region(name, manager.budget_bytes)
    manager.map("weights")
    driver.failing = frozenset({"release"})
    manager.unmap("weights", after="x")
    assert manager.get("weights").state is RegionState.UNMAPPED
    assert manager.usage().regions == {"weights": driver.created_bytes} == {"weights": manager.budget_bytes}
    assert changes[-1].used_bytes == manager.get("weights").held_bytes == manager.budget_bytes
    with pytest.raises(OutOfMemoryError, match=r"`gradients` within .* and 0 B are free; held by `weights`"):
        manager.map("gradients")
    driver.failing = frozenset()
    manager.map("gradients")
    assert manager.usage().regions == {"gradients": driver.created_bytes} == {"gradients": manager.budget_bytes}


@pytest.mark.parametrize("read", ["held", "free", "usage"])
def test_asking_what_is_held_tries_again_to_give_back(manager: MemoryManager, driver: Any, read: str) -> None:  # V7
    region = manager.region("weights", 2 * MIB)
    manager.map("weights")
    driver.failing = frozenset({"release"})
    manager.unmap("weights", after="x")
    driver.failing = frozenset()
    assert driver.created_bytes == 2 * MIB
    if read == "held":
        assert region.held_bytes == 0
    elif read == "free":
        manager.memory.free_bytes()
    else:
        usage = manager.usage()
        assert (usage.regions, usage.used_bytes) == ({}, 0)
    assert driver.created_bytes == manager.memory.ledger.total_bytes == 0


def test_check_sees_bytes_that_nobody_owns(manager: MemoryManager) -> None:
    stray = object()
    manager.memory.ledger.acquire(stray, "stray", 5)
    with pytest.raises(RunFailedError, match=r"has 5 bytes \(`stray` 5\), the driver counts: 0"):
        manager.check()
    manager.memory.ledger.release(stray)


def test_after_200_steps_everything_is_as_after_the_first(manager: MemoryManager) -> None:  # M8
    unit = manager.memory.granularity
    manager.region("weights", 2 * unit, content=Content.CONSTANT).place("w", (unit,), torch.bfloat16)
    manager.region("rollout_kv", 4 * unit, handle_bytes=unit)
    after_step = []
    for step in range(200):
        manager.map("weights", "rollout_kv")
        manager.get("weights").tensor("w")
        manager.unmap("rollout_kv", after=f"decode[{step}]")
        manager.unmap("weights", after="ref_suffix")
        after_step.append((manager.memory.live(), manager.usage().regions, manager.usage().pinned))
    assert all(seen == after_step[0] for seen in after_step)


def test_threads_that_move_different_regions_do_not_disturb_each_other(manager: MemoryManager) -> None:  # M9
    for name in "abcd":
        manager.region(name, 4 * MIB, handle_bytes=2 * MIB).place("v", (MIB,), torch.uint8)
    faults: list[BaseException] = []

    def work(name: str, number: int) -> None:
        try:
            for step in range(30):
                manager.map(name)
                values = manager.get(name).tensor("v")
                values.fill_(number)
                assert values.eq(number).all()
                manager.unmap(name, after=f"step {step}")
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(name, number)) for number, name in enumerate("abcd")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults
    assert manager.usage().regions == {}


def test_close_gives_everything_back_and_can_be_repeated(driver: Any) -> None:
    manager = MemoryManager(driver, budget_bytes=32 * MIB, host_budget_bytes=32 * MIB)
    manager.region("weights", 4 * MIB, content=Content.SAVED).place("w", (MIB,), torch.uint8)
    manager.map("weights")
    manager.unmap("weights", after="x")
    manager.map("weights")
    driver.failing = frozenset({"unmap"})
    with pytest.raises(DriverCallError):
        manager.close_region("weights")
    driver.failing = frozenset()
    manager.close()
    manager.close()
    assert driver.created_bytes == 0
    assert manager.host.held_bytes == 0
