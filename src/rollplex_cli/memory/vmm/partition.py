"""Streams whose kernels run on some of a GPU's multiprocessors (SMs) only.

They are streams of green contexts of the CUDA driver. It stands here because this folder is the only importer of
`cuda`; nothing about it is memory.

Facts relied upon: a green context shares memory, modules and the primary context of its device, so tensors and
kernels of PyTorch need nothing special; where an SM may run a kernel is decided by the stream it is launched on (for
a captured graph: captured on). SMs come in groups of 8 on compute capability 9.0, and a split's remainder is a
resource like its groups.
"""

from __future__ import annotations

from typing import Any

from rollplex_cli.memory.vmm.cuda import CudaDriver


class SmPartition:
    """Some SMs of a GPU as one resource for streams. Keep it open as long as a stream of it is in use.

    Args:
        driver: of the GPU; PyTorch must have been initialised on it.
        num_sms: at least so many; the driver rounds up to what it can give.
        rest: take all the other SMs instead.

    Raises:
        DriverCallError: the driver does not split SMs like this.
    """

    def __init__(self, driver: CudaDriver, num_sms: int, *, rest: bool = False) -> None:
        self._api, self._bindings = driver, driver.bindings
        kind = self._bindings.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM
        whole = driver.call("cuDeviceGetDevResource", driver.cuda_device, kind)
        groups, _, remaining = driver.call_all("cuDevSmResourceSplitByCount", 1, whole, 0, num_sms)
        own = remaining if rest else groups[0]
        self.num_sms = int(own.sm.smCount)
        self.total_sms = int(whole.sm.smCount)
        description = driver.call("cuDevResourceGenerateDesc", [own], 1)
        flags = self._bindings.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        self._context: Any = driver.call("cuGreenCtxCreate", description, driver.cuda_device, flags)
        self._streams: list[Any] = []

    def stream(self, priority: int = 0) -> int:
        """A new stream, as the handle that `torch.cuda.ExternalStream` takes."""
        flags = self._bindings.CUstream_flags.CU_STREAM_NON_BLOCKING
        stream = self._api.call("cuGreenCtxStreamCreate", self._context, flags, priority)
        self._streams.append(stream)
        return int(stream)

    def close(self) -> None:
        """Destroy the streams and the context; nothing may be running on them."""
        for stream in self._streams:
            self._api.call("cuStreamDestroy", stream)
        self._streams.clear()
        context, self._context = self._context, None
        if context is not None:
            self._api.call("cuGreenCtxDestroy", context)
