"""The rules of virtual memory, one by one, on the real drivers. Numbers are the invariants of memory/DESIGN.md."""

from __future__ import annotations

import gc
import pickle
from typing import Any

import pytest
import torch

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.memory.vmm import open_driver
from rollplex_cli.memory.vmm.base import DriverCallError, OutOfMemoryError
from rollplex_cli.memory.vmm.space import LiveResources, Mapping, Reservation, VirtualMemory


@pytest.fixture
def memory(driver: Any) -> VirtualMemory:
    return VirtualMemory(driver)


def mapped(memory: VirtualMemory, reservation: Reservation, offset: int, size: int) -> Mapping:
    """Fresh accessible memory that lives as long as its mapping."""
    handle = memory.create(size, "test")
    mapping = memory.map(reservation, offset, handle)
    memory.set_access(reservation, offset, size)
    handle.close()
    return mapping


def close_all(reservation: Reservation) -> None:
    for mapping in reservation.mappings:
        mapping.close()
    reservation.close()


def test_sizes_offsets_and_alignments_are_whole_units(memory: VirtualMemory) -> None:
    unit = memory.granularity
    with pytest.raises(ValueError, match="positive multiple"):
        memory.reserve(unit + 1)
    with pytest.raises(ValueError, match="positive multiple"):
        memory.create(0, "test")
    with pytest.raises(ValueError, match="power of two"):
        memory.reserve(unit, alignment=3 * unit)
    reservation = memory.reserve(4 * unit, alignment=4 * unit)
    assert reservation.address % (4 * unit) == 0
    handle = memory.create(2 * unit, "test")
    for offset in (unit // 2, -unit, 3 * unit):
        with pytest.raises(ValueError, match="does not lie in the range"):
            memory.map(reservation, offset, handle)
    handle.close()
    reservation.close()
    assert memory.live() == LiveResources()


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_overlapping_mappings_are_refused_and_change_nothing(memory: VirtualMemory, offset: int) -> None:  # V2
    unit = memory.granularity
    reservation = memory.reserve(8 * unit)
    mapped(memory, reservation, 2 * unit, unit)
    mapped(memory, reservation, 3 * unit, unit)
    before = memory.live()
    handle = memory.create(3 * unit, "test")
    with pytest.raises(ValueError, match="overlaps another one"):
        memory.map(reservation, offset * unit, handle)
    handle.close()
    assert memory.live() == before
    close_all(reservation)


def test_alias_sees_writes_and_outlives_the_handle_and_the_other_address(memory: VirtualMemory) -> None:  # V3, V4
    unit = memory.granularity
    first, second = memory.reserve(unit), memory.reserve(2 * unit)
    handle = memory.create(unit, "test")
    memory.map(first, 0, handle)
    alias = memory.map(second, unit, handle)
    memory.set_access(first, 0, unit)
    memory.set_access(second, unit, unit)
    first.tensor(0, (unit,), torch.uint8).fill_(7)
    assert second.tensor(unit, (unit,), torch.uint8).eq(7).all()
    handle.close()
    first.mappings[0].close()
    assert second.tensor(unit, (unit,), torch.uint8).eq(7).all()
    assert (memory.live().created_bytes, memory.live().unreleased) == (unit, 1)
    alias.close()
    assert memory.live().handles == 0
    close_all(first)
    close_all(second)


def test_an_address_keeps_its_place_and_gets_new_memory(memory: VirtualMemory) -> None:
    unit = memory.granularity
    reservation = memory.reserve(unit)
    mapped(memory, reservation, 0, unit)
    tensor = reservation.tensor(0, (unit // 2,), torch.bfloat16)
    tensor.fill_(1.5)
    reservation.mappings[0].close()
    mapped(memory, reservation, 0, unit)
    again = reservation.tensor(0, (unit // 2,), torch.bfloat16)
    assert again.data_ptr() == tensor.data_ptr() == reservation.address
    if memory.driver.zeroes_new_memory:
        assert again.eq(0).all()
    again.fill_(2.5)
    assert tensor.eq(2.5).all()
    del tensor, again
    close_all(reservation)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.float8_e4m3fn])
def test_tensors_are_plain_tensors_of_any_type(memory: VirtualMemory, dtype: torch.dtype) -> None:
    unit = memory.granularity
    reservation = memory.reserve(2 * unit)
    mapped(memory, reservation, 0, unit)
    mapped(memory, reservation, unit, unit)
    tensor = reservation.tensor(unit - 64, (4, 4), dtype)  # over the border of two handles
    assert (tensor.dtype, tensor.shape, str(tensor.device)) == (dtype, (4, 4), memory.driver.device)
    assert tensor.is_contiguous()
    assert not tensor._is_view()
    assert tensor.untyped_storage().nbytes() == 16 * dtype.itemsize
    values = torch.arange(16).view(4, 4)
    tensor.copy_(values)
    assert tensor.float().cpu().equal(values.float())
    parameter = torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype, device=tensor.device), requires_grad=False)
    parameter.data = tensor
    assert parameter.data_ptr() == reservation.address + unit - 64
    del tensor, parameter
    close_all(reservation)


def test_tensors_need_accessible_memory(memory: VirtualMemory) -> None:  # V5
    unit = memory.granularity
    reservation = memory.reserve(4 * unit)
    handle = memory.create(unit, "test")
    mapping = memory.map(reservation, unit, handle)
    for offset, count in ((unit, 4), (0, 4), (2 * unit - 2, 4), (3 * unit, 4), (-4, 4)):
        with pytest.raises(ValueError, match="outside of accessible memory"):
            reservation.tensor(offset, (count,), torch.uint8)
    memory.set_access(reservation, unit, unit)
    reservation.tensor(unit, (unit,), torch.uint8).fill_(1)
    with pytest.raises(ValueError, match="outside of accessible memory"):
        reservation.tensor(2 * unit - 2, (4,), torch.uint8)
    with pytest.raises(ValueError, match="no multiple of the size"):
        reservation.tensor(unit + 1, (1,), torch.float32)
    with pytest.raises(ValueError, match="outside of accessible memory"):
        reservation.tensor(unit, (0, 3), torch.float32)
    mapping.close()
    with pytest.raises(ValueError, match="outside of accessible memory"):
        reservation.tensor(unit, (4,), torch.uint8)
    handle.close()
    reservation.close()


def test_access_is_set_on_whole_mappings_without_gaps(memory: VirtualMemory) -> None:
    unit = memory.granularity
    reservation = memory.reserve(8 * unit)
    for offset, size in ((0, 2), (2, 2), (5, 1)):
        handle = memory.create(size * unit, "test")
        memory.map(reservation, offset * unit, handle)
        handle.close()
    for offset, size in ((0, 1), (1, 3), (0, 3), (2, 4), (4, 1), (6, 1), (0, 6)):
        with pytest.raises(ValueError, match="not whole mappings"):
            memory.set_access(reservation, offset * unit, size * unit)
    memory.set_access(reservation, 0, 4 * unit)
    memory.set_access(reservation, 5 * unit, unit)
    close_all(reservation)


def test_closing_is_idempotent_and_the_closed_cannot_be_used(memory: VirtualMemory) -> None:  # V1
    unit = memory.granularity
    reservation, handle = memory.reserve(2 * unit), memory.create(unit, "test")
    mapping = memory.map(reservation, 0, handle)
    with pytest.raises(ValueError, match="with mappings cannot be closed"):
        reservation.close()
    for _ in range(2):
        handle.close()
        mapping.close()
        reservation.close()
    assert memory.live() == LiveResources()
    assert not mapping.accessible
    other = memory.create(unit, "test")
    with pytest.raises(ValueError, match="closed"):
        memory.map(reservation, 0, other)
    other.close()
    with pytest.raises(ValueError, match="closed"):
        memory.map(memory.reserve(unit), 0, handle)
    for left in list(memory._reservations):
        left.close()


def test_an_address_stays_reserved_while_a_tensor_over_it_lives(memory: VirtualMemory) -> None:  # V6
    unit = memory.granularity
    reservation = memory.reserve(unit)
    mapped(memory, reservation, 0, unit)
    part = reservation.tensor(0, (unit,), torch.uint8)[5:]
    freed: list[str] = []
    reservation.mappings[0].close()
    reservation.close(on_freed=lambda: freed.append("freed"))
    assert (memory.live().reservations, memory.live().retired, freed) == (1, 1, [])
    assert memory.live().created_bytes == 0
    other = memory.reserve(unit)
    assert other.address != reservation.address
    other.close()
    del part
    gc.collect()
    assert memory.live() == LiveResources()
    assert freed == ["freed"]


def test_a_handle_the_driver_does_not_take_is_kept_owned_and_tried_again(memory: VirtualMemory) -> None:  # V7
    driver: Any = memory.driver
    handle = memory.create(memory.granularity, "weights")
    driver.failing = frozenset({"release"})
    handle.close()
    assert (memory.live().handles, memory.live().unreleased) == (1, 1)
    assert memory.ledger.held_by("weights") == driver.created_bytes == memory.granularity
    driver.failing = frozenset()
    assert memory.live() == LiveResources()
    assert memory.ledger.total_bytes == driver.created_bytes == 0


@pytest.mark.parametrize("primitive", ["reserve", "create", "map", "set_access", "unmap", "free"])
def test_a_failed_primitive_changes_nothing(memory: VirtualMemory, primitive: str) -> None:  # V8
    unit = memory.granularity
    driver: Any = memory.driver
    reservation, handle = memory.reserve(2 * unit), memory.create(unit, "test")
    empty = memory.reserve(unit)
    mapping = memory.map(reservation, 0, handle)
    operations = {
        "reserve": lambda: memory.reserve(unit),
        "create": lambda: memory.create(unit, "test"),
        "map": lambda: memory.map(reservation, unit, handle),
        "set_access": lambda: memory.set_access(reservation, 0, unit),
        "unmap": mapping.close,
        "free": empty.close,
    }
    before = memory.live()
    driver.failing = frozenset({primitive})
    with pytest.raises((DriverCallError, OutOfMemoryError)):
        operations[primitive]()
    driver.failing = frozenset()
    assert memory.live() == before
    assert not mapping.closed
    assert not empty.closed
    memory.set_access(reservation, 0, unit)
    assert reservation.tensor(0, (unit,), torch.uint8).fill_(3).eq(3).all()
    handle.close()
    empty.close()
    close_all(reservation)


def test_the_device_running_out_is_an_error_with_numbers(memory: VirtualMemory) -> None:
    wanted = memory.round_up(memory.total_bytes() + memory.granularity)
    before = memory.live()
    with pytest.raises(OutOfMemoryError, match="wants .* and .* are free") as caught:
        memory.create(wanted, "test")
    assert caught.value.exit_code == 3
    assert caught.value.wanted_bytes == wanted
    assert 0 < caught.value.free_bytes <= memory.total_bytes()
    assert memory.live() == before


def test_errors_survive_a_trip_between_processes() -> None:
    error = OutOfMemoryError("`kv`", wanted_bytes=2048, free_bytes=-1, holders={"a": 1, "b": 1024}, hint="less")
    again = pickle.loads(pickle.dumps(error))
    assert (again.message, again.hint, again.wanted_bytes, again.holders) == (
        "`kv` wants 2.0 KiB and 0 B are free; held by `b` 1.0 KiB, `a` 1 B",
        "less",
        2048,
        {"b": 1024, "a": 1},
    )
    call = pickle.loads(pickle.dumps(DriverCallError("mmap", "no", hint="why")))
    assert (call.message, call.hint) == ("`mmap` failed: no", "why")
    assert isinstance(call, RunFailedError)


def test_no_driver_for_other_devices() -> None:
    with pytest.raises(ValueError, match="no memory driver for device: `xpu`"):
        open_driver("xpu")
