"""The optimizer's host arrays: masters and moments of the elements that a rank owns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rollplex_cli.engines.weights.rounding import check_types, join_into, take_remainder

if TYPE_CHECKING:
    from rollplex_cli.engines.trainer.adamw.elements import ParameterViews
    from rollplex_cli.engines.trainer.adamw.settings import MasterMode
    from rollplex_cli.memory.pinned import HostMemory, PinnedBuffer

STATE_PARTS = ("master", "exp_avg", "exp_avg_sq")
"""What a checkpoint holds of every parameter, in float32 (float64 for a float64 model), whatever the host keeps."""
BLOCK_ELEMENTS = 1 << 26
"""Masters are put together from their halves so many at a time."""


class HostState:
    """Flat arrays over the elements [start, stop) of the layout. All positions here are the layout's.

    Under `full` the masters are an array like the moments. Under `split` a master is the device's BF16 weight and a
    16-bit remainder kept here, so it exists whole only on request.

    Args:
        memory: page-locked memory within a budget; None takes PyTorch's, page-locked if `pin`.

    Raises:
        ValueError: `split` for weights that are not BF16 with float32 masters.
        DoesNotFitError: over the budget of `memory`, or memory that cannot be page-locked.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        weights: ParameterViews,
        dtype: torch.dtype,
        master: MasterMode,
        *,
        memory: HostMemory | None = None,
        pin: bool = False,
    ) -> None:
        check_types(dtype, weights.dtype)
        if master == "split" and weights.dtype == dtype:
            raise ValueError(f"weights of {weights.dtype} are their own masters: nothing is left for the host to keep")
        self.start, self.stop = start, stop
        self.dtype, self.is_split = dtype, master == "split"
        self.stored_dtype = torch.int16 if self.is_split else dtype
        self._weights, self._memory, self._pin = weights, memory, pin
        self._buffers: list[PinnedBuffer] = []
        self.stored = self._array("optimizer remainders" if self.is_split else "optimizer masters", self.stored_dtype)
        self.exp_avg = self._array("optimizer first moments", dtype)
        self.exp_avg_sq = self._array("optimizer second moments", dtype)

    def _array(self, owner: str, dtype: torch.dtype) -> torch.Tensor:
        count = self.stop - self.start
        if self._memory is None or count == 0:
            return torch.zeros(count, dtype=dtype, pin_memory=self._pin and count > 0)
        buffer = self._memory.allocate(owner, count * dtype.itemsize)
        self._buffers.append(buffer)
        return buffer.tensor.view(dtype)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element's state on the host, which is what an update moves each way."""
        return self.stored_dtype.itemsize + 2 * self.dtype.itemsize

    def take_weights(self) -> None:
        """Make the parameters' present values the masters; the moments stay."""
        if self.is_split:
            self.stored.zero_()
        else:
            self._weights.read(self.start, self.stored)

    def values(self, part: str, low: int, high: int) -> torch.Tensor:
        """Elements [low, high) of one of `STATE_PARTS` on the host: the array's own memory, but for masters under
        `split`, which are put together."""
        run = slice(low - self.start, high - self.start)
        if part != "master":
            return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}[part][run]
        if not self.is_split:
            return self.stored[run]
        weights = torch.empty(high - low, dtype=self._weights.dtype)
        self._weights.read(low, weights)
        out = torch.empty(high - low, dtype=self.dtype)
        join_into(weights, self.stored[run], out)
        return out

    def set_masters(self, low: int, values: torch.Tensor) -> None:
        """Take masters [n], on the host, for [low, low + n). Under `split` their upper halves are not kept here: the
        caller writes `rounded(values)` to the parameters."""
        stored = self.stored[low - self.start : low - self.start + len(values)]
        if self.is_split:
            take_remainder(values, stored)
        else:
            stored.copy_(values)

    def close(self) -> None:
        """Give page-locked memory back; the state is gone with it. The caller has drained the streams that copy."""
        self.stored = self.exp_avg = self.exp_avg_sq = torch.empty(0)
        while self._buffers:
            self._buffers.pop().close()
