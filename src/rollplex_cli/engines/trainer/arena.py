"""Every parameter's place in flat arrays, and the array that gradients accumulate in."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

ALIGNMENT = 64
"""Elements. Parameters start at multiples of it, so vectorised kernels cut a flat array the same way wherever a
chunk that is a multiple of it begins."""

_BLOCK = 1 << 20
"""Elements whose squares are summed in the arena's type."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter in the flat arrays."""

    name: str
    offset: int
    """First element."""
    numel: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Parameters with weight decay (matrices) first, then those without (norms and biases); gaps hold zeros."""

    slots: tuple[Slot, ...]
    decay_end: int
    """End of the part with weight decay; a multiple of `ALIGNMENT`."""
    size: int
    """Elements of a flat array."""

    @classmethod
    def of(cls, params: Mapping[str, torch.Tensor]) -> FlatLayout:
        """Lay out `params` (name to tensor) in their order within each part."""
        slots: list[Slot] = []
        cursor = decay_end = 0
        for decays in (True, False):
            for name, param in params.items():
                if (param.dim() >= 2) == decays:
                    slots.append(Slot(name, cursor, param.numel(), tuple(param.shape)))
                    cursor += -(-param.numel() // ALIGNMENT) * ALIGNMENT
            if decays:
                decay_end = cursor
        return cls(tuple(slots), decay_end, cursor)

    def view(self, flat: torch.Tensor, slot: Slot) -> torch.Tensor:
        """The part of a flat array that belongs to `slot`, in the parameter's shape."""
        return flat[slot.offset : slot.offset + slot.numel].view(slot.shape)

    def overlaps(self, start: int, stop: int) -> Iterator[tuple[Slot, int, int]]:
        """(slot, its first, its end) of every parameter with elements in [start, stop), cut to it; in flat
        coordinates."""
        index = max(bisect_right(self.slots, start, key=lambda slot: slot.offset) - 1, 0)
        for slot in self.slots[index:]:
            if slot.offset >= stop:
                return
            low, high = max(start, slot.offset), min(stop, slot.offset + slot.numel)
            if low < high:
                yield slot, low, high


@dataclass(frozen=True, slots=True)
class FlatMemory:
    """Where a flat array lies when it is not PyTorch's to place."""

    place: Callable[[int, torch.dtype], torch.Tensor]
    """(elements, dtype) -> zeroed tensor [elements], always at one address."""
    is_mapped: Callable[[], bool]
    """Whether it has memory now; what gets memory again reads as zeros."""


class GradientArena:
    """One flat array whose views are the parameters' `.grad`; backward accumulates into it in place.

    Its type is max(float32, parameter type). Owns the array; the parameters only borrow it.

    Args:
        params: name to parameter, on one device.
        memory: what holds the array; None leaves it to PyTorch. Without memory its gradients count as zeros.
    """

    def __init__(self, params: Mapping[str, torch.nn.Parameter], memory: FlatMemory | None = None) -> None:
        first = next(iter(params.values()))
        dtype = torch.promote_types(first.dtype, torch.float32)
        self.layout = FlatLayout.of(params)
        self._memory = memory
        if memory is None:
            self.flat = torch.zeros(self.layout.size, dtype=dtype, device=first.device)
        else:
            self.flat = memory.place(self.layout.size, dtype)
        self._params = dict(params)
        for slot in self.layout.slots:
            param = self._params[slot.name]
            if param.dtype != dtype:
                # Without it PyTorch refuses a gradient of another type than its parameter.
                param.grad_dtype = dtype
            param.grad = self.layout.view(self.flat, slot)

    def zero(self) -> None:
        """Start a new step."""
        if self._memory is None or self._memory.is_mapped():
            self.flat.zero_()

    def scale(self, factor: float) -> None:
        """Multiply every gradient by `factor`."""
        self.flat.mul_(factor)

    def norm(self) -> float:
        """Global L2 norm, squares summed per block in the arena's type and over blocks in float64."""
        return float(self.square_sum([(0, self.layout.size)]).sqrt())

    def square_sum(self, runs: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Sum of squares of the elements [start, stop) of each run, a float64 scalar."""
        total = torch.zeros((), dtype=torch.float64, device=self.flat.device)
        for start, stop in runs:
            blocks = self.flat[start:stop].split((stop - start) // _BLOCK * _BLOCK or stop - start)
            for run in blocks:
                # All whole blocks in one call: thousands of small kernels would take as long as a tenth of an update.
                rows = run.view(-1, _BLOCK) if len(run) % _BLOCK == 0 else run.view(1, -1)
                total += torch.linalg.vector_norm(rows, dim=1).to(torch.float64).square().sum()
        return total

    def check(self) -> None:
        """Assert that every gradient still lies at its place: whatever replaced one would be lost."""
        for slot in self.layout.slots:
            grad = self._params[slot.name].grad
            place = self.flat.data_ptr() + slot.offset * self.flat.element_size()
            assert grad is not None and grad.data_ptr() == place, slot.name
