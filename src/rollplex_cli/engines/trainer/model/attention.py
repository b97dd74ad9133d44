"""Attention kernels behind one signature; which one runs is a setting of the device, chosen by measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from rollplex_cli.engines.trainer.model.flash import bounds_of, flash_runs, supported
from rollplex_cli.rl.packing import suffix_mask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollplex_cli.engines.trainer.model.flash import Bounds


class Attention(Protocol):
    """softmax(q k^T / sqrt(d)) v with grouped query heads.

    `q` [B, H, S, d], `k` and `v` [B, KV, T, d]. `bias` [S * H / KV, T] is added to the scores (see `folded_bias`);
    without it attention is causal if `causal`, with S == T. Returns [B, S, H * d].
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        """See the class."""
        ...


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, bias: torch.Tensor | None = None, causal: bool = False
) -> torch.Tensor:
    """PyTorch's own kernel. With a bias, query heads that share a KV head become rows of one head, so keys and
    values are never repeated."""
    batch, heads, rows, dim = q.shape
    kv_heads = k.shape[1]
    if bias is None:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=heads != kv_heads)
    else:
        folded = q.reshape(batch, kv_heads, (heads // kv_heads) * rows, dim)
        out = F.scaled_dot_product_attention(folded, k, v, attn_mask=bias).reshape(batch, heads, rows, dim)
    return out.transpose(1, 2).reshape(batch, rows, heads * dim)


ATTENTION: Mapping[str, Attention] = {"sdpa": sdpa}


def causal_runs(lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> Attention:
    """Causal attention within runs of these lengths, laid end to end in one batch row; the others do not exist for a
    run."""
    if not supported(device, dtype):
        return _CausalRuns(tuple(lengths))
    return _FlashCausalRuns(bounds_of(lengths, lengths, device))


@dataclass(frozen=True, slots=True)
class _CausalRuns:
    lengths: tuple[int, ...]

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        assert causal and bias is None
        runs = zip(*(torch.split_with_sizes(t, self.lengths, 2) for t in (q, k, v)), strict=True)
        return torch.cat([sdpa(*run, causal=True) for run in runs], dim=1)


@dataclass(frozen=True, slots=True)
class _FlashCausalRuns:
    bounds: Bounds

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        bias: torch.Tensor | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        assert causal and bias is None
        q, k, v = (t.squeeze(0).transpose(0, 1) for t in (q, k, v))
        return flash_runs(q, k, v, self.bounds, causal=True).flatten(1).unsqueeze(0)


def folded_bias(
    segments: torch.Tensor, num_prefix_tokens: int, queries_per_kv: int, dtype: torch.dtype
) -> torch.Tensor:
    """Additive mask [queries_per_kv * S, num_prefix_tokens + S] of packed responses behind a shared prefix:
    0 where a row may look, -inf elsewhere. `segments` [S] as in `PackedSuffix`."""
    allowed = suffix_mask(segments, num_prefix_tokens)
    bias = torch.zeros(allowed.shape, dtype=dtype, device=segments.device).masked_fill_(~allowed, float("-inf"))
    return bias.repeat(queries_per_kv, 1)
