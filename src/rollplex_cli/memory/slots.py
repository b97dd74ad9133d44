"""Where tensors lie in a range: pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex_cli.memory.tensors import num_bytes_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

DEFAULT_ALIGNMENT = 512
"""What PyTorch's own allocator gives, so kernels find the alignment they were tuned for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlot:
    """Place of a contiguous tensor; `offset` is in bytes from the start of the range."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return num_bytes_of(self.shape, self.dtype)

    @property
    def end(self) -> int:
        """First byte behind it."""
        return self.offset + self.num_bytes


def packed_bytes(specs: Iterable[tuple[Sequence[int], torch.dtype]], alignment: int = DEFAULT_ALIGNMENT) -> int:
    """Bytes that tensors of these shapes and types take when they are placed one after another."""
    end = 0
    for shape, dtype in specs:
        end = -(-end // alignment) * alignment + num_bytes_of(shape, dtype)
    return end


class SlotTable:
    """The slots of a range of `size_bytes`: none overlap, none leave it, none share a name.

    Args:
        owner: name of the range, for messages.
        size_bytes: its size.
    """

    def __init__(self, owner: str, size_bytes: int) -> None:
        self._owner = owner
        self._size_bytes = size_bytes
        self._slots: dict[str, TensorSlot] = {}

    @property
    def used_bytes(self) -> int:
        """End of the last slot."""
        return max((slot.end for slot in self._slots.values()), default=0)

    def ordered(self) -> tuple[TensorSlot, ...]:
        """All slots by offset."""
        return tuple(sorted(self._slots.values(), key=lambda slot: slot.offset))

    def get(self, name: str) -> TensorSlot:
        """The slot of this name.

        Raises:
            ValueError: there is none.
        """
        if name not in self._slots:
            raise ValueError(f"`{self._owner}` has no tensor: `{name}`")
        return self._slots[name]

    def place(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, *, offset: int | None, alignment: int
    ) -> TensorSlot:
        """Enter a slot at `offset`, or behind all others.

        Raises:
            ValueError: a name twice, an overlap, a place outside of the range or misaligned, no elements.
        """
        if name in self._slots:
            raise ValueError(f"`{self._owner}` has a tensor of this name already: `{name}`")
        if offset is None:
            offset = -(-self.used_bytes // alignment) * alignment
        slot = TensorSlot(name=name, offset=offset, shape=tuple(shape), dtype=dtype)
        if offset < 0 or offset % alignment or offset % dtype.itemsize or not slot.num_bytes:
            raise ValueError(f"`{name}` of {slot.num_bytes} bytes cannot lie at offset: {offset}")
        if slot.end > self._size_bytes:
            raise ValueError(f"`{name}` ends at byte {slot.end} of `{self._owner}`, which has: {self._size_bytes}")
        for other in self._slots.values():
            if slot.offset < other.end and other.offset < slot.end:
                raise ValueError(f"`{name}` overlaps another tensor of `{self._owner}`: `{other.name}`")
        self._slots[name] = slot
        return slot
