"""The CUDA driver's handling of answers, against bindings that give the answers a machine without a GPU cannot give."""

from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from rollplex_cli.core.errors import DoesNotFitError
from rollplex_cli.memory.vmm import cuda
from rollplex_cli.memory.vmm.base import DriverCallError, OutOfMemoryError


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Bindings:
    """Answers every call with success, except those named in `answers`; remembers names in order."""

    CUresult = Result
    CU_MEMHOSTREGISTER_PORTABLE = 1

    def __init__(self) -> None:
        self.answers: dict[str, tuple[Any, ...]] = {
            "cuDeviceGetAttribute": (Result.CUDA_SUCCESS, 1),
            "cuMemGetAllocationGranularity": (Result.CUDA_SUCCESS, 2 << 20),
            "cuMemGetInfo": (Result.CUDA_SUCCESS, 300, 1000),
            "cuMemCreate": (Result.CUDA_SUCCESS, 77),
            "cuGetErrorName": (Result.CUDA_SUCCESS, b"CUDA_ERROR_INVALID_VALUE"),
            "cuGetErrorString": (Result.CUDA_SUCCESS, b"invalid argument"),
        }
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return SimpleNamespace if name.endswith(("Location", "Prop", "AccessDesc")) else AnyMember()

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append(name)
            return self.answers.get(name, (Result.CUDA_SUCCESS, 0))

        return call


class AnyMember:
    """An enumeration that has every member."""

    def __getattr__(self, name: str) -> str:
        return name


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    bindings = Bindings()
    monkeypatch.setattr(cuda, "_bindings", lambda: bindings)
    return bindings


def test_running_out_carries_wanted_and_free_bytes(bindings: Bindings) -> None:
    driver = cuda.CudaDriver(3)
    assert (driver.device, driver.granularity) == ("cuda:3", 2 << 20)
    assert driver.create(2 << 20) == 77
    bindings.answers["cuMemCreate"] = (Result.CUDA_ERROR_OUT_OF_MEMORY, None)
    with pytest.raises(OutOfMemoryError) as caught:
        driver.create(4 << 20)
    assert (caught.value.wanted_bytes, caught.value.free_bytes) == (4 << 20, 300)


@pytest.mark.parametrize("name", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemHostRegister"])
def test_other_refusals_name_the_call_and_the_drivers_reason(bindings: Bindings, name: str) -> None:
    driver = cuda.CudaDriver()
    bindings.answers[name] = (Result.CUDA_ERROR_INVALID_VALUE, None)
    actions = {
        "cuMemCreate": lambda: driver.create(1),
        "cuMemMap": lambda: driver.map(0, 1, 77),
        "cuMemSetAccess": lambda: driver.set_access(0, 1),
        "cuMemUnmap": lambda: driver.unmap(0, 1),
        "cuMemHostRegister": lambda: driver.pin(0, 1),
    }
    with pytest.raises(DriverCallError) as caught:
        actions[name]()
    assert caught.value.message == f"`{name}` failed: CUDA_ERROR_INVALID_VALUE: invalid argument"
    assert bindings.calls.count("cuCtxPushCurrent") == bindings.calls.count("cuCtxPopCurrent")


def test_the_context_is_current_only_during_a_call_and_released_once(bindings: Bindings) -> None:
    driver = cuda.CudaDriver()
    assert (driver.free_bytes(), driver.total_bytes()) == (300, 1000)
    assert bindings.calls[-3:] == ["cuCtxPushCurrent", "cuMemGetInfo", "cuCtxPopCurrent"]
    driver.close()
    driver.close()
    assert bindings.calls.count("cuDevicePrimaryCtxRelease") == 1
    with pytest.raises(ValueError, match="the driver of `cuda:0` is closed"):
        driver.free_bytes()


def test_a_gpu_without_virtual_memory_management_does_not_fit(bindings: Bindings) -> None:
    bindings.answers["cuDeviceGetAttribute"] = (Result.CUDA_SUCCESS, 0)
    with pytest.raises(DoesNotFitError, match="a GPU without virtual memory management: `cuda:1`"):
        cuda.CudaDriver(1)
    assert "cuDevicePrimaryCtxRetain" not in bindings.calls
