"""The driver of a GPU, on the virtual memory functions of the CUDA driver API. The only importer of `cuda`.

Facts relied upon: DESIGN.md of `memory`, section 1.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import DoesNotFitError
from rollplex_cli.memory.vmm.base import DriverCallError, OutOfMemoryError

if TYPE_CHECKING:
    from collections.abc import Iterator


def _bindings() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise DoesNotFitError(
            "no CUDA bindings for Python: `cuda.bindings`", hint="`make setup` on a machine with a GPU installs them"
        ) from error
    return driver


class CudaDriver:
    """Implements `MemoryDriver` for one GPU. A handle is the driver's allocation handle as an integer.

    Args:
        index: ordinal of the GPU among those visible to the process, as PyTorch counts them.

    Raises:
        DoesNotFitError: no bindings, or a GPU without virtual memory management.
        DriverCallError: the driver does not start.
    """

    zeroes_new_memory = False

    def __init__(self, index: int = 0) -> None:
        self._driver = driver = _bindings()
        try:
            self._call("cuInit", 0)
        except RuntimeError as error:  # the bindings' own fault when there is no driver library
            raise DriverCallError("cuInit", "no CUDA driver library on this machine") from error
        self._device = self._call("cuDeviceGet", index)
        supported = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
        if not self._call("cuDeviceGetAttribute", supported, self._device):
            raise DoesNotFitError(f"a GPU without virtual memory management: `cuda:{index}`")
        self.device = f"cuda:{index}"
        location = driver.CUmemLocation()
        location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = index
        self._properties = driver.CUmemAllocationProp()
        self._properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._properties.location = location
        self._access = driver.CUmemAccessDesc()
        self._access.location = location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        # The recommended unit gives large page-table entries; the least one may be smaller.
        unit = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        self.granularity = int(self._call("cuMemGetAllocationGranularity", self._properties, unit))
        # PyTorch's own context, kept alive because unmapping after its end would be undefined.
        self._context: Any | None = self._call("cuDevicePrimaryCtxRetain", self._device)

    @property
    def bindings(self) -> Any:
        """The module `cuda.bindings.driver`, for its constants."""
        return self._driver

    @property
    def cuda_device(self) -> Any:
        """The driver's handle of the GPU."""
        return self._device

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function of the driver with this GPU's context current; its first result, or None.

        Raises:
            DriverCallError: it did not succeed.
        """
        with self._in_context():
            return self._call(name, *arguments)

    def call_all(self, name: str, *arguments: Any) -> list[Any]:
        """As `call`, but all results."""
        with self._in_context():
            return self._results(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        results = self._results(name, *arguments)
        return results[0] if results else None

    def _results(self, name: str, *arguments: Any) -> list[Any]:
        results: list[Any]
        status, *results = getattr(self._driver, name)(*arguments)
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise DriverCallError(name, self._describe(status))
        return results

    def _describe(self, status: Any) -> str:
        _, name = self._driver.cuGetErrorName(status)
        _, text = self._driver.cuGetErrorString(status)
        return f"{_decode(name) or int(status)}: {_decode(text)}"

    @contextmanager
    def _in_context(self) -> Iterator[None]:
        """Make the GPU's context current in this thread, for the calls that ask for one."""
        if self._context is None:
            raise ValueError(f"the driver of `{self.device}` is closed")
        self._call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent")

    def reserve(self, size: int, alignment: int) -> int:
        """See `MemoryDriver.reserve`."""
        return int(self._call("cuMemAddressReserve", size, alignment, 0, 0))

    def free(self, address: int, size: int) -> None:
        """See `MemoryDriver.free`."""
        self._call("cuMemAddressFree", address, size)

    def create(self, size: int) -> int:
        """See `MemoryDriver.create`."""
        status, handle = self._driver.cuMemCreate(size, self._properties, 0)
        if status == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise OutOfMemoryError("a handle", wanted_bytes=size, free_bytes=self.free_bytes())
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise DriverCallError("cuMemCreate", self._describe(status))
        return int(handle)

    def release(self, handle: int, size: int) -> None:  # noqa: ARG002 - the driver knows the size
        """See `MemoryDriver.release`."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, size: int, handle: int) -> None:
        """See `MemoryDriver.map`."""
        self._call("cuMemMap", address, size, 0, handle, 0)

    def set_access(self, address: int, size: int) -> None:
        """See `MemoryDriver.set_access`."""
        self._call("cuMemSetAccess", address, size, [self._access], 1)

    def unmap(self, address: int, size: int) -> None:
        """See `MemoryDriver.unmap`."""
        self._call("cuMemUnmap", address, size)

    def free_bytes(self) -> int:
        """See `MemoryDriver.free_bytes`."""
        return self._memory_info()[0]

    def total_bytes(self) -> int:
        """See `MemoryDriver.total_bytes`."""
        return self._memory_info()[1]

    def _memory_info(self) -> tuple[int, int]:
        with self._in_context():
            status, free, total = self._driver.cuMemGetInfo()
        if status != self._driver.CUresult.CUDA_SUCCESS:
            raise DriverCallError("cuMemGetInfo", self._describe(status))
        return int(free), int(total)

    def pin(self, address: int, size: int) -> None:
        """See `MemoryDriver.pin`."""
        with self._in_context():
            self._call("cuMemHostRegister", address, size, self._driver.CU_MEMHOSTREGISTER_PORTABLE)

    def unpin(self, address: int) -> None:
        """See `MemoryDriver.unpin`."""
        with self._in_context():
            self._call("cuMemHostUnregister", address)

    def close(self) -> None:
        """See `MemoryDriver.close`."""
        context, self._context = self._context, None
        if context is not None:
            self._call("cuDevicePrimaryCtxRelease", self._device)


def _decode(text: bytes | None) -> str:
    return text.decode("ascii", "replace") if text else ""
