"""FlashAttention (Dao 2023) over runs of rows laid end to end, as PyTorch ships it: CUDA, 16-bit types.

The raw kernels, because the ones behind `scaled_dot_product_attention` take no runs of different lengths.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

Bounds = tuple[torch.Tensor, torch.Tensor, int, int]
"""First rows of the runs of queries and of keys (int32, the total last), longest run of each."""


def bounds_of(query_lengths: Sequence[int], key_lengths: Sequence[int], device: torch.device) -> Bounds:
    """Bounds of runs of these lengths."""
    first = _starts(query_lengths, device)
    second = first if query_lengths is key_lengths else _starts(key_lengths, device)
    return first, second, max(query_lengths), max(key_lengths)


def _starts(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


def supported(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels run there."""
    return device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)


def flash_runs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, causal: bool = False
) -> torch.Tensor:
    """Attention of every run to itself, all rows to all rows or to those before, [rows, heads, d] each;
    differentiable. Keys may have fewer heads."""
    out: torch.Tensor = _FlashRuns.apply(q, k, v, bounds, causal)  # type: ignore[no-untyped-call]
    return out


class _FlashRuns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, causal: bool
    ) -> torch.Tensor:
        out, lse, *state = flash_forward(q, k, v, bounds, causal=causal)
        ctx.save_for_backward(q, k, v, out, lse, *state)
        ctx.bounds, ctx.causal = bounds, causal
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, out, lse, *state = ctx.saved_tensors
        grad = grads[0].contiguous()
        return *flash_backward(grad, q, k, v, out, lse, ctx.bounds, state, causal=ctx.causal), None, None


def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bounds: Bounds, *, causal: bool
) -> tuple[torch.Tensor, ...]:
    """(output [rows, H, d], log-sum-exp [H, rows] float32, state of the random numbers that are not used)."""
    out, lse, *state, _ = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, causal, False)
    return out, lse, *state


def flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    bounds: Bounds,
    state: list[torch.Tensor],
    *,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of queries, keys and values; `out` and `lse` may be those of a larger attention that this is a part
    of."""
    dq, dk, dv = torch.ops.aten._flash_attention_backward(grad, q, k, v, out, lse, *bounds, 0.0, causal, *state)
    return dq, dk, dv
