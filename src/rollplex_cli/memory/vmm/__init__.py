"""Virtual memory: one set of rules over two real drivers, `cuda` and `host`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollplex_cli.memory.vmm.base import MemoryDriver


def open_driver(device: str, *, capacity_bytes: int | None = None) -> MemoryDriver:
    """The driver of a PyTorch device: `cpu` gives the host driver, `cuda` or `cuda:N` the CUDA one.

    Only the driver that is asked for is imported. `capacity_bytes` is the size of the host driver's memory (None: what
    the machine has available now); a GPU's is its own.

    Raises:
        DoesNotFitError: the device has no virtual memory management.
        RunFailedError: the driver does not start.
        ValueError: another kind of device.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu":
        from rollplex_cli.memory.vmm.host import HostDriver

        return HostDriver(capacity_bytes)
    if kind == "cuda":
        from rollplex_cli.memory.vmm.cuda import CudaDriver

        return CudaDriver(int(index or 0))
    raise ValueError(f"no memory driver for device: `{device}`")
