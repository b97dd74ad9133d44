"""The decoder: embedding, layers, log-probs."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from rollplex_cli.engines.trainer.model.parallel import sharded_embedding, sharded_logprobs
from rollplex_cli.engines.trainer.model.primitives import (
    Angles,
    compute_dtype,
    inverse_frequencies,
    rms_norm,
    rotary,
    swiglu,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex_cli.engines.trainer.model.attention import Attention
    from rollplex_cli.engines.trainer.model.parameters import DecoderWeights, ModelWeights, TextSizes
    from rollplex_cli.engines.trainer.model.suffix_attention import SuffixAttention


class KeyValue(NamedTuple):
    """Keys (rotated) and values of one layer, each [B, KV heads, tokens, head_dim]."""

    keys: torch.Tensor
    values: torch.Tensor


def rope(sizes: TextSizes, position_ids: torch.Tensor, dtype: torch.dtype) -> Angles:
    """Angles of M-RoPE (Qwen2-VL, section 2.1): each channel pair follows the temporal, row or column position.

    `position_ids` [3, B, S] int64.
    """
    axes, frequencies = _rope_constants(sizes, dtype, position_ids.device)
    return Angles.of(position_ids.to(compute_dtype(dtype))[axes].permute(1, 2, 0) * frequencies)


@lru_cache(maxsize=64)
def _rope_constants(sizes: TextSizes, dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Axis and frequency of every channel pair."""
    axes = torch.tensor(sizes.mrope_axes, device=device)
    return axes, inverse_frequencies(sizes.head_dim, sizes.rope_theta, dtype, device)


def embed(
    weights: ModelWeights,
    token_ids: torch.Tensor,
    media: torch.Tensor | None,
    spans: Sequence[tuple[int, int]],
) -> torch.Tensor:
    """[L] ids -> [L, hidden], placeholder runs `spans` (first and last index) replaced by rows of `media`."""
    if media is None:
        return _words(weights, token_ids)
    pieces, text, cursor = [], [], 0
    for first, last in spans:
        text.append(token_ids[cursor:first])
        cursor = last + 1
    text.append(token_ids[cursor:])
    words = _words(weights, torch.cat(text)).split([len(t) for t in text])
    rows = media.split([last - first + 1 for first, last in spans])
    for word, row in zip(words, rows, strict=False):
        pieces += [word, row]
    return torch.cat([*pieces, words[-1]])


def span_rows(spans: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """All indices of the runs `spans`, int64."""
    return torch.cat([torch.arange(first, last + 1, device=device) for first, last in spans])


def add_rows(hidden: torch.Tensor, rows: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """`hidden` [B, S, hidden] with `features` [N, hidden] added at the flat indices `rows` [N] (DeepStack)."""
    return hidden.flatten(0, 1).index_add(0, rows, features).view(hidden.shape)


def _words(weights: ModelWeights, token_ids: torch.Tensor) -> torch.Tensor:
    if weights.parallel.size == 1:
        return F.embedding(token_ids, weights.embed)
    return sharded_embedding(token_ids, weights.embed, weights.vocab, weights.parallel)


def project_qkv(
    layer: DecoderWeights, sizes: TextSizes, x: torch.Tensor, angles: Angles
) -> tuple[torch.Tensor, KeyValue]:
    """Queries [B, H, S, d] and keys and values of normalised `x` [B, S, hidden]."""
    heads = (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)
    qkv = layer.qkv(x)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k, v = qkv.view(*x.shape[:2], -1, sizes.head_dim).split(heads, dim=2)
        qkv = torch.cat((layer.q_norm(q), layer.k_norm(k), v), dim=2).flatten(2)
    q, k, v = rotary(qkv, angles, heads, heads_first=True)
    return q, KeyValue(k, v)


def decoder_layer(
    layer: DecoderWeights,
    sizes: TextSizes,
    hidden: torch.Tensor,
    angles: Angles,
    attention: Attention,
    *,
    prefix: KeyValue | None = None,
    behind: SuffixAttention | None = None,
) -> tuple[torch.Tensor, KeyValue]:
    """One layer on `hidden` [B, S, hidden]; returns the new hidden states and the layer's own keys and values.

    Without `prefix`, attention is causal among the rows. With it, `behind` says what rows see.
    """
    q, own = project_qkv(layer, sizes, rms_norm(hidden, layer.input_norm, sizes.norm_eps), angles)
    if prefix is None:
        mixed = attention(q, own.keys, own.values)
    else:
        assert behind is not None
        mixed = behind(q, prefix, own)
    hidden = hidden + layer.output(mixed)
    del q, mixed  # without autograd nothing else holds them, and the MLP is where a forward is widest
    x = rms_norm(hidden, layer.post_norm, sizes.norm_eps)
    return hidden + layer.down(swiglu(layer.gate_up(x))), own


def key_value_only(layer: DecoderWeights, sizes: TextSizes, hidden: torch.Tensor, angles: Angles) -> KeyValue:
    """Keys and values of a layer whose output nobody reads (the last one, on a prefix)."""
    x = rms_norm(hidden, layer.input_norm, sizes.norm_eps)
    kv = layer.kv(x)
    if layer.k_norm is not None:
        k, v = kv.view(*x.shape[:2], -1, sizes.head_dim).chunk(2, dim=2)
        kv = torch.cat((layer.k_norm(k), v), dim=2).flatten(2)
    k, v = rotary(kv, angles, (sizes.num_kv_heads, sizes.num_kv_heads), heads_first=True)
    return KeyValue(k, v)


def token_logprobs(
    weights: ModelWeights,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float = 1.0,
    banned: torch.Tensor | None = None,
) -> torch.Tensor:
    """log p of `targets` [N] after the last layer's `hidden` [N, hidden], in max(float32, dtype), [N].

    As the rollout's sampler: columns `banned` (of this rank's shard of the vocabulary) are pushed to -1e9, then
    logits are divided by `temperature`.
    """
    x = weights.parallel.enter(rms_norm(hidden, weights.norm, weights.text_sizes.norm_eps))
    logits = F.linear(x, weights.head)
    logits = logits.to(compute_dtype(logits.dtype))
    if banned is not None:
        logits = logits.index_fill(-1, banned, -1e9)
    if temperature != 1.0:
        logits = logits / temperature
    if weights.parallel.size > 1:
        return sharded_logprobs(logits, targets, weights.vocab, weights.parallel)
    return -F.cross_entropy(logits, targets, reduction="none")
