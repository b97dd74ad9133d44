"""Attention on the CPU, in place of SGLang's reference loops (see `patches.PATCHES`).

Same mathematics, one call for many requests. The signatures are those of the functions replaced.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional


def decode(
    _backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    *_unused: Any,
    scaling: float | None = None,
    **_unused_names: Any,
) -> torch.Tensor:
    """Attention of one query per request, [n, heads, dim], over padded keys and values of the whole batch."""
    longest = int(seq_lens.max())
    slots = req_to_token[req_pool_indices, :longest].long()
    padding = torch.arange(longest).unsqueeze(0) >= seq_lens.unsqueeze(1)
    # Padding reads the request's own first slot: its weight is 0, but a slot never written may hold NaN.
    slots = torch.where(padding, slots[:, :1], slots)
    keys = k_cache[slots].transpose(1, 2).to(query.dtype)
    values = v_cache[slots].transpose(1, 2).to(query.dtype)
    groups = query.shape[1] // keys.shape[1]
    # Query heads that share a key head become rows of one product.
    rows = query.view(query.shape[0], keys.shape[1], groups, query.shape[2])
    mask = torch.zeros(padding.shape, dtype=query.dtype).masked_fill_(padding, -torch.inf)[:, None, None, :]
    result = functional.scaled_dot_product_attention(rows, keys, values, attn_mask=mask, scale=scaling)
    output.copy_(result.reshape(output.shape))
    return output


def extend(
    backend: Any,
    query: torch.Tensor,
    output: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_prefix_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    *_unused: Any,
    scaling: float | None = None,
    enable_gqa: bool = False,
    **_unused_names: Any,
) -> torch.Tensor:
    """Causal attention of new tokens over cached ones; no query rows for tokens whose keys are cached."""
    if int(extend_seq_lens.max()) == 1:
        return decode(
            backend, query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, scaling=scaling
        )
    start = 0
    rows = query.transpose(0, 1)
    requests = zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_prefix_lens.tolist(), strict=True)
    for pool, total, prefix in requests:
        end = start + total - prefix
        slots = req_to_token[pool, :total].long()
        keys = k_cache[slots].transpose(0, 1).to(query.dtype)
        values = v_cache[slots].transpose(0, 1).to(query.dtype)
        mask = None
        if prefix:
            mask = torch.arange(total).unsqueeze(0) <= torch.arange(prefix, total).unsqueeze(1)
        result = functional.scaled_dot_product_attention(
            rows[:, start:end].unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=enable_gqa,
        )
        output[start:end] = result.squeeze(0).transpose(0, 1)
        start = end
    return output


def vision(
    self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bsz: int,
    cu_seqlens: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    **_unused: Any,
) -> torch.Tensor:
    """Attention within each segment of patches, [patches, heads, dim]; segments of equal length in one call."""
    assert cu_seqlens is not None
    assert attention_mask is None
    assert bsz == 1
    bounds = cu_seqlens.tolist()
    starts: dict[int, list[int]] = {}
    for start, end in pairwise(bounds):
        if end > start:
            starts.setdefault(end - start, []).append(start)
    if len(starts) == 1:
        (length,) = starts
        return _segments(q, k, v, length, self.scale)
    output = torch.empty_like(q)
    for length, first in starts.items():
        rows = (torch.tensor(first).unsqueeze(1) + torch.arange(length)).flatten()
        output[rows] = _segments(q[rows], k[rows], v[rows], length, self.scale)
    return output


def _segments(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, scale: float) -> torch.Tensor:
    split = [x.reshape(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v)]
    result = functional.scaled_dot_product_attention(split[0], split[1], split[2], scale=scale)
    return result.transpose(1, 2).reshape(q.shape)
