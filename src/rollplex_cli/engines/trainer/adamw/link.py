"""How fast page-locked host memory and a GPU exchange bytes here: what the streaming of an update is measured by."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """Bytes per second."""

    to_device: float
    """Alone."""
    to_host: float
    """Alone."""
    both: float
    """Sum of the two directions while both are busy."""

    def seconds(self, to_device_bytes: int, to_host_bytes: int) -> float:
        """Least time for these bytes, both directions at once: no update can be faster."""
        return max(
            to_device_bytes / self.to_device,
            to_host_bytes / self.to_host,
            (to_device_bytes + to_host_bytes) / self.both,
        )


def measure_link(device: torch.device, host: tuple[torch.Tensor, torch.Tensor]) -> LinkRates:
    """Copy two page-locked host tensors of one size (64 MiB or more), the first to the GPU and the second back, alone
    and at once. The second is overwritten; everything else on the device should be idle."""
    source, target = host
    inward, outward = torch.empty_like(source, device=device), torch.empty_like(target, device=device)
    load, offload = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def copy_in() -> None:
        with torch.cuda.stream(load):
            inward.copy_(source, non_blocking=True)

    def copy_out() -> None:
        with torch.cuda.stream(offload):
            target.copy_(outward, non_blocking=True)

    def copy_both() -> None:
        copy_in()
        copy_out()

    sizes = {copy_in: source.nbytes, copy_out: target.nbytes, copy_both: source.nbytes + target.nbytes}
    rates = [size / _seconds(action, device) for action, size in sizes.items()]
    return LinkRates(to_device=rates[0], to_host=rates[1], both=rates[2])


def _seconds(action: Callable[[], None], device: torch.device) -> float:
    """Mean time of the action, enqueued `_ROUNDS` times in a row after one for warming up."""
    action()
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    for _ in range(_ROUNDS):
        action()
    torch.cuda.synchronize(device)
    return (time.perf_counter() - started) / _ROUNDS
