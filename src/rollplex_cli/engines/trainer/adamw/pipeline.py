"""Chunks on their way: host to device, update, device to host, each on a stream of its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex_cli.engines.trainer.adamw.ranges import Chunk
    from rollplex_cli.engines.trainer.adamw.settings import MasterMode
    from rollplex_cli.engines.trainer.adamw.state import HostState

SLOTS = 3
"""One chunk arrives, one is updated, one leaves."""
_ALIGN_BYTES = 256


class Held(NamedTuple):
    """A chunk's state where the update works on it: host arrays' own memory without staging. All [n]."""

    stored: torch.Tensor
    """Masters, or under `split` their remainders (int16)."""
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class Buffers(NamedTuple):
    """Types of the arrays that an update needs on the device, each of a chunk's length."""

    slots: tuple[tuple[torch.dtype, ...], ...]
    """Of each slot; empty without staging."""
    scratch: dict[str, torch.dtype]

    @classmethod
    def of(
        cls, weight: torch.dtype, master: torch.dtype, mode: MasterMode, *, staged: bool, exchanged: bool
    ) -> Buffers:
        """What weights and masters of these types need; `exchanged` where data-parallel ranks swap new weights."""
        stored = torch.int16 if mode == "split" else master
        scratch: dict[str, torch.dtype] = {}
        if mode == "split":
            scratch["master"] = master
        if weight != master:
            scratch |= {"weights": weight, "nan": torch.bool}
        if exchanged:
            scratch["received"] = weight
        return cls(((stored, master, master),) * SLOTS if staged else (), scratch)

    def num_bytes(self, chunk_elements: int) -> int:
        """Size of one buffer that holds them all."""
        dtypes = [*(dtype for slot in self.slots for dtype in slot), *self.scratch.values()]
        return sum(_padded(chunk_elements * dtype.itemsize) for dtype in dtypes)


def staging_bytes(
    chunk_elements: int,
    *,
    weight: torch.dtype = torch.bfloat16,
    master: torch.dtype = torch.float32,
    mode: MasterMode = "full",
    staged: bool = True,
    exchanged: bool = False,
) -> int:
    """Device memory that an update holds from its first chunk to its last, however many parameters there are."""
    return Buffers.of(weight, master, mode, staged=staged, exchanged=exchanged).num_bytes(chunk_elements)


class Pipeline:
    """One pass over a rank's chunks.

    On CUDA `load` and `offload` only enqueue: the copy engine of each direction works beside the current stream, which
    waits for the chunk it is about to use and for nothing else. A slot is loaded again once its last content is on the
    host. Without staging both give back the host arrays and copy nothing.

    Args:
        state: the host arrays.
        staging: bytes on the device, at least `buffers.num_bytes(chunk_elements)`; held until `finish`.
        streams: (load, offload); None where the device is the host.
    """

    def __init__(
        self,
        state: HostState,
        buffers: Buffers,
        chunk_elements: int,
        staging: torch.Tensor,
        streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None,
    ) -> None:
        self._state, self._streams = state, streams
        self.to_device_bytes = self.to_host_bytes = 0
        cutter = _Cutter(staging, chunk_elements)
        self._slots = [Held(*(cutter.take(dtype) for dtype in slot)) for slot in buffers.slots]
        self._scratch = {name: cutter.take(dtype) for name, dtype in buffers.scratch.items()}
        self._freed: list[torch.cuda.Event | None] = [None] * SLOTS
        if streams is not None:
            # The staging memory may have been somebody else's until now, on this stream.
            streams[0].wait_stream(torch.cuda.current_stream())

    def scratch(self, name: str, count: int) -> torch.Tensor:
        """The first `count` elements of a scratch array; every call gives the same memory."""
        return self._scratch[name][:count]

    def load(self, number: int, chunk: Chunk, parts: Sequence[str]) -> Held:
        """Bring these parts of the state of the chunk, the `number`-th of this pass."""
        low, high = chunk.start - self._state.start, chunk.stop - self._state.start
        host = Held(*(flat[low:high] for flat in (self._state.stored, self._state.exp_avg, self._state.exp_avg_sq)))
        if not self._slots:
            return host
        index = number % SLOTS
        held = Held(*(array[: high - low] for array in self._slots[index]))
        pairs = [(getattr(held, part), getattr(host, part)) for part in parts]
        self.to_device_bytes += sum(source.nbytes for _, source in pairs)
        if self._streams is None:
            _copy(pairs)
            return held
        load, freed = self._streams[0], self._freed[index]
        if freed is not None:
            load.wait_event(freed)
        with torch.cuda.stream(load):
            _copy(pairs)
        torch.cuda.current_stream().wait_stream(load)
        return held

    def offload(self, number: int, chunk: Chunk, held: Held, parts: Sequence[str]) -> None:
        """Send these parts back, once everything enqueued so far on the current stream is done."""
        if not self._slots:
            return
        low, high = chunk.start - self._state.start, chunk.stop - self._state.start
        pairs = [(getattr(self._state, part)[low:high], getattr(held, part)) for part in parts]
        self.to_host_bytes += sum(source.nbytes for _, source in pairs)
        if self._streams is None:
            _copy(pairs)
            return
        offload = self._streams[1]
        offload.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(offload):
            _copy(pairs)
        self._freed[number % SLOTS] = offload.record_event()

    def finish(self) -> None:
        """Wait until the host arrays are complete and the staging memory is unused: the CPU reads the former next,
        without asking a stream."""
        if self._streams is not None:
            self._streams[1].synchronize()
            torch.cuda.current_stream().synchronize()


class _Cutter:
    """Takes arrays of one length off a buffer, one after the other."""

    def __init__(self, buffer: torch.Tensor, count: int) -> None:
        self._bytes, self._count, self._cursor = buffer.view(-1).view(torch.uint8), count, 0

    def take(self, dtype: torch.dtype) -> torch.Tensor:
        """The next array."""
        size = self._count * dtype.itemsize
        array = self._bytes[self._cursor : self._cursor + size].view(dtype)
        self._cursor += _padded(size)
        return array


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)


def _padded(num_bytes: int) -> int:
    return math.ceil(num_bytes / _ALIGN_BYTES) * _ALIGN_BYTES
