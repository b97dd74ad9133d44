"""Attention of packed responses behind a shared prefix.

Every response attends to the whole prefix and, causally, to itself. Two ways to compute it, chosen by device and
dtype (`suffix_attention`):

`masked`: one call of PyTorch's attention over [prefix, responses] with an additive mask. Any device and dtype; its
    mask is quadratic in the responses of a group.
`flash`: FlashAttention (Dao 2023) over the prefix for all rows and over each response by itself, merged by their
    log-sum-exps. The backward calls the kernel once per part with the log-sum-exp of the whole, which gives the
    gradients of the whole: both depend on the other part only through that number and the output. CUDA, 16-bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

from rollplex_cli.engines.trainer.model.attention import folded_bias, sdpa
from rollplex_cli.engines.trainer.model.flash import bounds_of, flash_backward, flash_forward, supported

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex_cli.engines.trainer.model.language import KeyValue


class SuffixAttention(Protocol):
    """`q` [1, H, S, d] of the packed rows; `prefix` and `own` keys and values [1, KV, P or S, d]; gives
    [1, S, H * d]."""

    def __call__(self, q: torch.Tensor, prefix: KeyValue, own: KeyValue) -> torch.Tensor:
        """See the class."""


def suffix_attention(
    lengths: Sequence[int], segments: torch.Tensor, num_prefix_tokens: int, queries_per_kv: int, dtype: torch.dtype
) -> SuffixAttention:
    """The attention of responses of these `lengths`; `segments` [S] (see `PackedSuffix`) tells the device."""
    if supported(segments.device, dtype):
        return _Flash(lengths, num_prefix_tokens, segments.device)
    return _Masked(folded_bias(segments, num_prefix_tokens, queries_per_kv, dtype))


class _Masked:
    def __init__(self, bias: torch.Tensor) -> None:
        self._bias = bias

    def __call__(self, q: torch.Tensor, prefix: KeyValue, own: KeyValue) -> torch.Tensor:
        keys = torch.cat((prefix.keys, own.keys), dim=2)
        values = torch.cat((prefix.values, own.values), dim=2)
        return sdpa(q, keys, values, bias=self._bias)


class _Flash:
    def __init__(self, lengths: Sequence[int], num_prefix_tokens: int, device: torch.device) -> None:
        rows = sum(lengths)
        self._own = bounds_of(lengths, lengths, device)
        self._prefix = bounds_of([rows], [num_prefix_tokens], device)

    def __call__(self, q: torch.Tensor, prefix: KeyValue, own: KeyValue) -> torch.Tensor:
        out: torch.Tensor = _FlashSuffix.apply(q, *prefix, *own, self._prefix, self._own)  # type: ignore[no-untyped-call]
        return out


class _FlashSuffix(torch.autograd.Function):
    """Shapes as in `SuffixAttention`; the kernels take [rows, heads, d], and the views between the two are made here,
    where autograd does not see them. `prefix_bounds` and `own_bounds` are (query bounds, key bounds, longest query,
    longest key)."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        *tensors, prefix_bounds, own_bounds = args
        q, prefix_k, prefix_v, own_k, own_v = rows = [t.squeeze(0).transpose(0, 1) for t in tensors]
        out, lse, *state = flash_forward(q, own_k, own_v, own_bounds, causal=True)
        if prefix_k.shape[0]:
            first, first_lse, *_ = flash_forward(q, prefix_k, prefix_v, prefix_bounds, causal=False)
            whole = torch.logaddexp(first_lse, lse)
            # Log-sum-exps are [heads, rows].
            share, first_share = ((part - whole).exp().t().unsqueeze(-1) for part in (lse, first_lse))
            # In float32, rounded once.
            lse, out = whole, torch.addcmul(first * first_share, out, share, out=torch.empty_like(out))
        ctx.save_for_backward(*rows, out, lse, *state)
        ctx.prefix_bounds, ctx.own_bounds = prefix_bounds, own_bounds
        return out.reshape(1, len(out), -1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        q, prefix_k, prefix_v, own_k, own_v, out, lse, *state = ctx.saved_tensors
        grad = grads[0].reshape(out.shape).contiguous()
        dq, dk, dv = flash_backward(grad, q, own_k, own_v, out, lse, ctx.own_bounds, state, causal=True)
        if prefix_k.shape[0]:
            first = flash_backward(grad, q, prefix_k, prefix_v, out, lse, ctx.prefix_bounds, state, causal=False)
            dq, *prefix_grads = dq + first[0], *first[1:]
        else:
            prefix_grads = [torch.zeros_like(prefix_k), torch.zeros_like(prefix_v)]
        return *(t.transpose(0, 1).unsqueeze(0) for t in (dq, *prefix_grads, dk, dv)), None, None
