"""Host memory within a budget."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from rollplex_cli.core.errors import DoesNotFitError
from rollplex_cli.core.units import MIB
from rollplex_cli.memory.pinned import HostMemory
from rollplex_cli.memory.vmm.base import DriverCallError, OutOfMemoryError


def test_buffers_are_zeroed_exact_and_pinned_where_there_is_a_device(driver: Any) -> None:
    host = HostMemory(driver, 4 * MIB)
    buffer = host.allocate("masters", 3 * MIB)
    assert (buffer.tensor.shape, buffer.tensor.dtype) == ((3 * MIB,), torch.uint8)
    assert not buffer.tensor.any()
    assert buffer.tensor.data_ptr() % 4096 == 0
    assert host.holders() == {"masters": 3 * MIB}
    if driver.device != "cpu":
        assert buffer.tensor.is_pinned()
    buffer.close()
    buffer.close()
    assert host.holders() == {}
    assert (driver.calls["pin"], driver.calls["unpin"]) == (1, 1)
    with pytest.raises(ValueError, match="a closed buffer has no tensor"):
        _ = buffer.tensor


def test_the_budget_holds_and_names_the_holders(driver: Any) -> None:
    host = HostMemory(driver, 4 * MIB)
    first = host.allocate("masters", 3 * MIB)
    with pytest.raises(OutOfMemoryError) as caught:
        host.allocate("moments", 2 * MIB)
    assert caught.value.message == (
        "`moments` on the host wants 2.0 MiB and 1.0 MiB are free; held by `masters` 3.0 MiB"
    )
    second = host.allocate("moments", MIB)
    assert host.held_bytes == host.budget_bytes
    first.close()
    second.close()
    assert host.held_bytes == 0


def test_bytes_are_held_as_long_as_any_tensor_over_them_lives(driver: Any) -> None:
    host = HostMemory(driver, 4 * MIB)
    buffer = host.allocate("masters", MIB)
    part = buffer.tensor.view(torch.float32)[7:]
    buffer.close()
    assert host.held_bytes == MIB
    part.fill_(2.0)
    assert part.eq(2.0).all()
    del part
    gc.collect()
    assert host.held_bytes == 0


def test_memory_that_cannot_be_pinned_is_an_error_and_is_given_back(driver: Any) -> None:
    host = HostMemory(driver, 4 * MIB)
    driver.failing = frozenset({"pin"})
    with pytest.raises(DoesNotFitError, match=r"`masters` wants 1\.0 MiB of pinned host memory, .* injected") as caught:
        host.allocate("masters", MIB)
    assert "ulimit -l" in (caught.value.hint or "")
    assert host.held_bytes == 0


def test_a_failed_unpin_leaves_the_buffer_open(driver: Any) -> None:
    host = HostMemory(driver, 4 * MIB)
    buffer = host.allocate("masters", MIB)
    driver.failing = frozenset({"unpin"})
    with pytest.raises(DriverCallError):
        buffer.close()
    assert buffer.tensor.numel() == MIB
    driver.failing = frozenset()
    buffer.close()
    assert host.held_bytes == 0
