"""What only the host driver can show: where the pages really are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from rollplex_cli.core.units import MIB
from rollplex_cli.memory.vmm.base import DriverCallError, OutOfMemoryError
from rollplex_cli.memory.vmm.host import HostDriver, available_bytes
from rollplex_cli.memory.vmm.space import VirtualMemory


def resident_bytes() -> int:
    """Resident shared pages of this process (`RssShmem`)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no line RssShmem")


def test_memory_really_goes_back_on_unmap() -> None:
    driver = HostDriver(64 * MIB)
    memory = VirtualMemory(driver)
    reservation = memory.reserve(32 * MIB)
    before = resident_bytes()
    handle = memory.create(32 * MIB, "test")
    mapping = memory.map(reservation, 0, handle)
    memory.set_access(reservation, 0, 32 * MIB)
    reservation.tensor(0, (32 * MIB,), torch.uint8).fill_(1)
    assert resident_bytes() - before >= 32 * MIB
    mapping.close()
    assert resident_bytes() - before < MIB
    assert driver.free_bytes() == 32 * MIB
    handle.close()
    assert driver.free_bytes() == 64 * MIB
    reservation.close()


def test_a_forked_childs_copy_of_the_descriptor_does_not_keep_the_pages() -> None:
    driver = HostDriver(8 * MIB)
    handle = driver.create(4 * MIB)
    copy = os.dup(handle)
    assert os.fstat(copy).st_blocks * 512 >= 4 * MIB
    driver.release(handle, 4 * MIB)
    assert os.fstat(copy).st_blocks == 0
    os.close(copy)


def test_pages_are_there_before_the_first_write() -> None:
    driver = HostDriver(8 * MIB)
    handle = driver.create(2 * MIB)
    assert os.fstat(handle).st_blocks * 512 == 2 * MIB
    driver.release(handle, 2 * MIB)


def test_create_stops_at_the_capacity_and_leaves_nothing_behind() -> None:
    driver = HostDriver(MIB)
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OutOfMemoryError, match=r"wants 2\.0 MiB and 1\.0 MiB are free"):
        driver.create(2 * MIB)
    assert len(os.listdir("/proc/self/fd")) == files
    assert driver.free_bytes() == MIB


def test_reserved_addresses_cost_no_memory() -> None:
    driver = HostDriver(MIB)
    address = driver.reserve(1024 * MIB * 64, 2 * MIB)
    assert address % (2 * MIB) == 0
    driver.free(address, 1024 * MIB * 64)


def test_a_refused_reservation_names_the_call() -> None:
    with pytest.raises(DriverCallError, match="`mmap` failed: Cannot allocate memory") as caught:
        HostDriver(MIB).reserve(1 << 60, 4096)
    assert caught.value.hint is not None


def test_the_default_capacity_is_what_the_machine_has() -> None:
    assert abs(HostDriver().total_bytes() - available_bytes()) < 2 * 1024 * MIB
