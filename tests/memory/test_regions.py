"""Regions on both drivers. Numbers are the invariants of memory/DESIGN.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollplex_cli.core.errors import RollplexError
from rollplex_cli.core.units import GIB, MIB
from rollplex_cli.memory import crash
from rollplex_cli.memory.pinned import HostMemory
from rollplex_cli.memory.regions import (
    Content,
    Region,
    RegionError,
    RegionState,
    handle_bytes_for,
    map_regions,
    unmap_regions,
)
from rollplex_cli.memory.vmm.base import DriverCallError, OutOfMemoryError
from rollplex_cli.memory.vmm.space import LiveResources, VirtualMemory


class Workbench:
    """A memory, a host budget, and three pieces of 2 MiB for each region."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.memory = VirtualMemory(driver)
        self.host = HostMemory(driver, 64 * MIB)
        self.regions: list[Region] = []

    def region(self, name: str = "weights", content: Content = Content.UNDEFINED) -> Region:
        region = Region(self.memory, name, 5 * MIB, content=content, host=self.host, handle_bytes=2 * MIB)
        region.place("values", (5 * MIB // 4,), torch.int32)
        self.regions.append(region)
        return region

    def close(self) -> None:
        self.driver.failing = frozenset()
        self.driver.fail_in = 0
        for region in self.regions:
            region.close()
        assert self.memory.live() == LiveResources()
        assert self.host.held_bytes == 0


@pytest.fixture
def bench(driver: Any) -> Any:
    bench = Workbench(driver)
    yield bench
    bench.close()


def fill(region: Region) -> torch.Tensor:
    """Write known values; gives a copy of them."""
    values = region.tensor("values")
    values.copy_(torch.arange(values.numel(), dtype=torch.int32))
    return values.cpu().clone()


def test_tensors_keep_their_addresses_over_unmap_and_map(bench: Workbench) -> None:  # R1
    region = bench.region()
    region.map()
    address = region.tensor("values").data_ptr()
    assert address == region.address
    for _ in range(3):
        region.unmap(after="decode[3]")
        region.map()
        assert region.tensor("values").data_ptr() == address


def test_a_wrong_call_names_state_and_wanted_and_changes_nothing(bench: Workbench) -> None:  # R2
    region = bench.region()
    with pytest.raises(RegionError, match="`weights` cannot be unmapped: it has to be `mapped` and is `unmapped`"):
        region.unmap(after="x")
    with pytest.raises(RegionError, match="cannot give its tensor `values`: it has to be `mapped`"):
        region.tensor("values")
    region.map()
    with pytest.raises(RegionError, match="cannot be mapped: it has to be `unmapped` and is `mapped`"):
        region.map()
    region.unmap(after="x")
    with pytest.raises(RegionError, match="cannot be unmapped"):  # a double release
        region.unmap(after="x")
    with pytest.raises(ValueError, match="distinct and of one memory"):
        map_regions([region, region])
    map_regions([])
    unmap_regions([], after="x")
    region.close()
    region.close()
    with pytest.raises(RegionError, match="is `closed`"):
        region.map()


@pytest.mark.parametrize("content", list(Content))
def test_content_after_unmap_and_map_is_what_was_declared(bench: Workbench, content: Content) -> None:  # R3
    region = bench.region(content=content)
    region.map()
    before = fill(region)
    region.unmap(after="x")
    region.map()
    after = region.tensor("values").cpu()
    if content in (Content.SAVED, Content.CONSTANT):
        assert after.equal(before)
        assert bench.host.holders() == {"weights (saved)": region.size_bytes}
    else:
        assert bench.host.held_bytes == 0
    if content is Content.ZEROED:
        assert not after.any()


def test_constant_content_is_copied_once_and_saved_content_each_time(bench: Workbench) -> None:
    for content in (Content.SAVED, Content.CONSTANT):
        region = bench.region(name=content, content=content)
        region.map()
        first = fill(region)
        region.unmap(after="x")
        region.map()
        region.tensor("values").neg_()
        region.unmap(after="x")
        region.map()
        assert region.tensor("values").cpu().equal(-first if content is Content.SAVED else first)


def test_a_region_that_keeps_its_content_needs_host_memory(bench: Workbench) -> None:
    with pytest.raises(ValueError, match="needs host memory: `saved`"):
        Region(bench.memory, "weights", MIB, content=Content.SAVED)


def test_unmap_waits_for_the_drains_first(bench: Workbench) -> None:  # R4
    region, seen = bench.region(), []
    region.map()
    region.add_drain(lambda: seen.append(region.state))
    region.unmap(after="x")
    assert seen == [RegionState.MAPPED]
    region.map()

    def broken() -> None:
        raise RuntimeError("stream lost")

    region.add_drain(broken)
    with pytest.raises(RuntimeError, match="stream lost"):
        region.unmap(after="x")
    assert region.state is RegionState.MAPPED
    region._drains.clear()


@pytest.mark.parametrize("fail_in", range(1, 20))
def test_a_map_of_several_regions_that_fails_anywhere_leaves_all_as_they_were(
    bench: Workbench, fail_in: int
) -> None:  # R5
    first, second = bench.region("first", Content.SAVED), bench.region("second")
    first.map()
    values = fill(first)
    first.unmap(after="decode[1]")
    before, ranges = bench.memory.live(), crash.unmapped_ranges()
    bench.driver.fail_in = fail_in
    try:
        map_regions([first, second])
    except (DriverCallError, OutOfMemoryError):
        assert (first.state, second.state) == (RegionState.UNMAPPED, RegionState.UNMAPPED)
        assert bench.memory.live() == before
        assert sorted(crash.unmapped_ranges()) == sorted(ranges)
        bench.driver.fail_in = 0
        map_regions([first, second])
    else:
        assert fail_in > 14  # 2 regions x (3 create + 3 map + 1 set access)
        bench.driver.fail_in = 0
    assert first.tensor("values").cpu().equal(values)


@pytest.mark.parametrize("fail_in", range(1, 12))
def test_an_unmap_of_several_regions_that_fails_anywhere_keeps_every_byte(bench: Workbench, fail_in: int) -> None:  # R6
    regions = [bench.region("first"), bench.region("second", Content.SAVED)]
    map_regions(regions)
    values = [fill(region) for region in regions]
    before = bench.memory.live()
    bench.driver.fail_in = fail_in
    try:
        unmap_regions(regions, after="x")
    except RollplexError:
        assert [region.state for region in regions] == [RegionState.MAPPED] * 2
        assert bench.memory.live() == before
        assert bench.host.held_bytes == 0
        for region, value in zip(regions, values, strict=True):
            assert region.tensor("values").cpu().equal(value)
    else:
        assert fail_in > 6
        bench.driver.fail_in = 0
        assert [region.state for region in regions] == [RegionState.UNMAPPED] * 2
        assert bench.memory.live().created_bytes == bench.driver.created_bytes == 0


@pytest.mark.parametrize("content", [Content.SAVED, Content.CONSTANT])
def test_a_failed_unmap_has_saved_nothing_even_if_the_copy_cannot_be_unpinned(
    bench: Workbench, content: Content
) -> None:  # R6
    region = bench.region(content=content)
    region.map()
    fill(region)
    bench.driver.failing = frozenset({"unmap", "unpin"})
    with pytest.raises(DriverCallError):
        region.unmap(after="x")
    bench.driver.failing = frozenset()
    assert region.state is RegionState.MAPPED
    assert bench.host.holders() == {"weights (saved)": region.size_bytes}  # still pinned, so still counted
    values = region.tensor("values").neg_().cpu().clone()
    region.unmap(after="x")
    region.map()
    assert region.tensor("values").cpu().equal(values)
    assert bench.host.holders() == {"weights (saved)": region.size_bytes}


def test_what_cannot_be_undone_is_broken_and_close_still_gives_everything_back(bench: Workbench) -> None:  # R7
    region = bench.region()
    bench.driver.failing = frozenset({"set_access", "unmap"})
    with pytest.raises(DriverCallError):
        region.map()
    assert region.state is RegionState.BROKEN
    assert region.held_bytes == bench.driver.created_bytes > 0
    with pytest.raises(RegionError, match="is `broken`"):
        region.map()
    with pytest.raises(DriverCallError):
        region.close()
    bench.driver.failing = frozenset()
    region.close()
    assert bench.memory.live() == LiveResources()


def test_running_out_names_wanted_free_and_holders(bench: Workbench) -> None:
    first, second = bench.region("first"), bench.region("second")
    first.map()
    bench.driver.failing = frozenset({"create"})
    with pytest.raises(OutOfMemoryError, match=r"`second` on `.*` wants .* are free; held by `first`") as caught:
        second.map()
    assert caught.value.wanted_bytes == second.size_bytes
    assert caught.value.holders == {"first": first.size_bytes}
    assert caught.value.exit_code == 3


def test_no_room_on_the_host_leaves_the_region_mapped(bench: Workbench) -> None:
    region = bench.region(content=Content.SAVED)
    region.map()
    values = fill(region)
    bench.host.budget_bytes = MIB
    with pytest.raises(OutOfMemoryError, match=r"`weights \(saved\)` on the host wants") as caught:
        region.unmap(after="x")
    assert "memory.host_budget_gib" in (caught.value.hint or "")
    assert region.state is RegionState.MAPPED
    assert region.tensor("values").cpu().equal(values)


def test_the_crash_table_knows_every_unmapped_region_and_why(bench: Workbench) -> None:  # R8
    region = bench.region()
    assert crash.explain(region.address) == f"address {region.address:#x} is in region `weights`, not mapped yet"
    region.map()
    assert crash.explain(region.address) is None
    region.unmap(after="decode[3]")
    last = region.address + region.size_bytes - 1
    assert crash.explain(last) == f"address {last:#x} is in region `weights`, unmapped after decode[3]"
    assert crash.explain(last + 1) is None
    region.map()
    tensor = region.tensor("values")
    region.close()
    assert crash.explain(region.address) == f"address {region.address:#x} is in region `weights`, closed"
    del tensor
    assert bench.memory.live() == LiveResources()
    assert crash.explain(region.address) is None


@pytest.mark.parametrize(
    ("region", "handle"), [(MIB, 64 * MIB), (2 * GIB, 128 * MIB), (16 * GIB, GIB), (200 * GIB, GIB)]
)
def test_handles_grow_with_the_region_up_to_a_gibibyte(region: int, handle: int) -> None:
    assert handle_bytes_for(region) == handle
