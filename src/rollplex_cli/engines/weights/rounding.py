"""Weights from masters: how a float32 value becomes the BF16 one that the device holds, and back.

BF16 is the upper half of float32. The weight is the master rounded to nearest, ties away from zero: the magnitude's
bits plus half of the last kept one, cut off. So what rounding takes away is the lower half read as a signed 16-bit
number, and weight and remainder together are the master, bit for bit:

    bits(master) = bits(weight) * 2^16 + remainder,    -2^15 <= remainder < 2^15

Ties to even, which PyTorch's own conversion does, would need a 17th bit to undo. Truncation has no such trouble and is
off by a whole step half of the time. A value above the largest finite one by half a step becomes infinite, as it would
in PyTorch, and comes back from its remainder. NaN stays NaN (with another payload).
"""

from __future__ import annotations

import sys

import torch

_NAN = 0x7FC0
_SIGN_SHIFT = 15
assert sys.byteorder == "little"


def round_into(master: torch.Tensor, out: torch.Tensor, nan: torch.Tensor) -> None:
    """Write the weights of `master` ([n], float32, contiguous) to `out` ([n], bfloat16), without other memory than
    `nan` ([n], bool), which is overwritten."""
    low, high = _halves(master)
    bits = out.view(torch.int16)
    # A lower half that is negative as a signed number borrowed one from the upper half.
    torch.bitwise_right_shift(low, _SIGN_SHIFT, out=bits)
    torch.sub(high, bits, out=bits)
    # The largest payloads of NaN would carry over into the sign: CUDA's own NaN, 0x7fffffff, into minus zero.
    torch.ne(master, master, out=nan)
    bits.masked_fill_(nan, _NAN)


def rounded(master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The weights of masters of any shape in the type of the weights: `master` itself where that is its own type.

    Raises:
        ValueError: another pair of types than equal ones, or float32 to bfloat16.
    """
    check_types(master.dtype, dtype)
    if master.dtype == dtype:
        return master
    flat = master.contiguous().view(-1)
    out = torch.empty_like(flat, dtype=dtype)
    round_into(flat, out, torch.empty_like(flat, dtype=torch.bool))
    return out.view(master.shape)


def take_remainder(master: torch.Tensor, out: torch.Tensor) -> None:
    """Write what rounding took from `master` ([n], float32, contiguous) to `out` ([n], int16)."""
    out.copy_(_halves(master)[0])


def join_into(weight: torch.Tensor, remainder: torch.Tensor, out: torch.Tensor) -> None:
    """Write the masters of weights ([n], bfloat16) with remainders ([n], int16) to `out` ([n], float32, contiguous)."""
    low, high = _halves(out)
    low.copy_(remainder)
    torch.bitwise_right_shift(remainder, _SIGN_SHIFT, out=high)
    high.add_(weight.view(torch.int16))


def check_types(master: torch.dtype, weight: torch.dtype) -> None:
    """Raise ValueError where no rule says how masters become weights."""
    if master != weight and (master, weight) != (torch.float32, torch.bfloat16):
        raise ValueError(f"no rounding from masters of {master} to weights of {weight}")


def _halves(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower and upper 16 bits of each element, views [n] of int16."""
    halves = value.view(torch.int16).view(-1, 2)
    return halves[:, 0], halves[:, 1]
