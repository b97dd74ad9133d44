"""`draw.draw` in one pass over the log-probabilities, for the GPU.

In PyTorch the noise of a batch of 64 is about thirty passes over [64, vocabulary] in each step. The same hash and the
same noise, but for rounding. Import only where there is Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
_STEP = tl.constexpr(2.0**-31)
_LARGEST = tl.constexpr(1.0 - 2.0**-24)
_SMALL = tl.constexpr(1.0 / 64)
_THIRD = tl.constexpr(1.0 / 3)


@triton.jit
def _mix(x):  # type: ignore[no-untyped-def]
    """`draw._mix_` of uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_block(logprobs, seeds, positions, values, tokens, stride, num_tokens, num_blocks, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """Largest logprob - log(noise) of one block of a row, and its token."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    key = _mix((seed & 0xFFFFFFFF).to(tl.uint32) ^ 0x9E3779B9)
    key = _mix(key ^ ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32))
    key = _mix(key + (position & 0xFFFFFFFF).to(tl.uint32))
    ids = part * block + tl.arange(0, block)
    inside = ids < num_tokens
    bits = _mix(_mix(ids.to(tl.uint32) * 0x9E3779B1 + 0x85EBCA6B) ^ key) & 0x7FFFFFFF
    uniform = (bits.to(tl.float32) + 0.5) * _STEP
    uniform = tl.minimum(uniform, _LARGEST)
    # -log1p(-u): near 0, where winners of many tokens are, 1 - u would keep too few digits.
    series = uniform * (1.0 + uniform * (0.5 + uniform * (_THIRD + uniform * 0.25)))
    noise = tl.where(uniform < _SMALL, series, -tl.log(1.0 - uniform))
    value = tl.load(logprobs + row * stride + ids, mask=inside, other=-float("inf")) - tl.log(noise)
    best, index = tl.max(value, axis=0, return_indices=True)
    tl.store(values + row * num_blocks + part, best)
    tl.store(tokens + row * num_blocks + part, (part * block + index).to(tl.int64))


def draw(logprobs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token per row, int64 [n], from log-probabilities [n, V] float32 with contiguous rows; seeds and positions
    int64 [n]."""
    count, num_tokens = logprobs.shape
    num_blocks = triton.cdiv(num_tokens, BLOCK)
    values = logprobs.new_empty(count, num_blocks)
    tokens = torch.empty(count, num_blocks, dtype=torch.int64, device=logprobs.device)
    _best_of_block[(count, num_blocks)](
        logprobs, seeds.long(), positions.long(), values, tokens, logprobs.stride(0), num_tokens, num_blocks,
        block=BLOCK,
    )  # fmt: skip
    return tokens.gather(1, values.argmax(dim=-1, keepdim=True)).squeeze(1)
