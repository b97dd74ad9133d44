"""Attention kernels; which one runs is a matter of device and dtype, chosen by measurement."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from rollplex_cli.engines.trainer.model.flash import bounds_of, flash_runs, supported
from rollplex_cli.rl.packing import suffix_mask

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex_cli.engines.trainer.model.flash import Bounds

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Causal softmax(q k^T / sqrt(d)) v with grouped query heads: `q` [B, H, S, d], `k` and `v` [B, KV, S, d]; gives
[B, S, H * d]."""


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, bias: torch.Tensor | None = None, causal: bool = False
) -> torch.Tensor:
    """PyTorch's own kernel: `q` [B, H, S, d], `k` and `v` [B, KV, T, d], gives [B, S, H * d]. `bias`
    [S * H / KV, T] is added to the scores (see `folded_bias`): query heads that share a KV head become rows of one
    head, so keys and values are never repeated. Without it attention is causal if `causal`, with S == T."""
    batch, heads, rows, dim = q.shape
    kv_heads = k.shape[1]
    if bias is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)
    else:
        folded = q.reshape(batch, kv_heads, (heads // kv_heads) * rows, dim)
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=bias).reshape(batch, heads, rows, dim)
    return out.transpose(1, 2).reshape(batch, rows, heads * dim)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """See `Attention`."""
    return sdpa(q, k, v, causal=True)


def causal_runs(lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> Attention:
    """Causal attention within runs of these lengths, laid end to end in one batch row; the others do not exist for a
    run."""
    if len(lengths) == 1:
        return causal
    if supported(device, dtype):
        return partial(_flash_runs, bounds_of(lengths, lengths, device))
    return partial(_run_by_run, tuple(lengths))


def _flash_runs(bounds: Bounds, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (q, k, v))
    return flash_runs(q, k, v, bounds, causal=True).flatten(1).unsqueeze(0)


def _run_by_run(lengths: tuple[int, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    runs = zip(*(torch.split_with_sizes(t, lengths, 2) for t in (q, k, v)), strict=True)
    return torch.cat([causal(*run) for run in runs], dim=1)


def folded_bias(
    segments: torch.Tensor, num_prefix_tokens: int, queries_per_kv: int, dtype: torch.dtype
) -> torch.Tensor:
    """Additive mask [queries_per_kv * S, num_prefix_tokens + S] of packed responses behind a shared prefix:
    0 where a row may look, -inf elsewhere. `segments` [S] as in `PackedSuffix`."""
    allowed = suffix_mask(segments, num_prefix_tokens)
    bias = torch.zeros(allowed.shape, dtype=dtype, device=segments.device).masked_fill_(~allowed, float("-inf"))
    return bias.repeat(queries_per_kv, 1)
