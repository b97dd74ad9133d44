"""The trainer lane's streams on a GPU: one free, others confined to some multiprocessors (SMs)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from rollplex_cli.memory.vmm.cuda import CudaDriver
    from rollplex_cli.memory.vmm.partition import SmPartition


class TrainerStreams:
    """Streams by the number of SMs kept from them, made when first asked for.

    `enter` orders each stream behind the one before it, so for tensors and for PyTorch's allocator they are one stream.

    Args:
        index: CUDA device.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._driver: CudaDriver | None = None
        self._partitions: list[SmPartition] = []
        self._streams: dict[tuple[int, bool], torch.cuda.Stream] = {}

    def enter(self, reserved_sms: int, *, high_priority: bool = False) -> None:
        """Work of this thread goes from now on to the stream that leaves `reserved_sms` SMs alone."""
        current, wanted = torch.cuda.current_stream(), self._stream(reserved_sms, high_priority)
        if current != wanted:
            wanted.wait_stream(current)
            torch.cuda.set_stream(wanted)

    def synchronize(self) -> None:
        """Wait for everything this thread has put on its stream."""
        torch.cuda.current_stream().synchronize()

    def _stream(self, reserved_sms: int, high_priority: bool) -> torch.cuda.Stream:
        key = (reserved_sms, high_priority)
        if key not in self._streams:
            priority = highest_priority() if high_priority else 0
            if reserved_sms:
                self._streams[key] = self._confined(reserved_sms, priority)
            else:
                self._streams[key] = torch.cuda.Stream(priority=priority)
        return self._streams[key]

    def _confined(self, reserved_sms: int, priority: int) -> torch.cuda.Stream:
        partition = self.partition(reserved_sms, rest=True)
        return torch.cuda.ExternalStream(partition.stream(priority), device=self._index)

    def partition(self, num_sms: int, *, rest: bool) -> SmPartition:
        """A partition that lives as long as this object."""
        from rollplex_cli.memory.vmm.cuda import CudaDriver
        from rollplex_cli.memory.vmm.partition import SmPartition

        if self._driver is None:
            self._driver = CudaDriver(self._index)
        self._partitions.append(SmPartition(self._driver, num_sms, rest=rest))
        return self._partitions[-1]


def highest_priority() -> int:
    """The priority of the streams that the GPU serves first."""
    return int(torch.cuda.Stream.priority_range()[1])  # type: ignore[call-arg]


def total_sms(index: int) -> int:
    """Multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def record_fence() -> torch.cuda.Event | None:
    """An event behind everything this thread has launched so far; None on a machine without a GPU."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event()
    event.record()
    return event
