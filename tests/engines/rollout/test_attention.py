"""Batched CPU attention against one request at a time, written out."""

from __future__ import annotations

import math

import pytest
import torch

from rollplex_cli.engines.rollout import attention

HEADS, KV_HEADS, DIM, SLOTS = 4, 2, 8, 300


def reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int) -> torch.Tensor:
    """Causal attention of rows first..first+n-1 over all keys, [n, HEADS, DIM], in float64."""
    keys = keys.double().repeat_interleave(HEADS // KV_HEADS, dim=1)
    values = values.double().repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = torch.einsum("nhd,khd->hnk", query.double(), keys) / math.sqrt(DIM)
    allowed = torch.arange(keys.shape[0]) <= (first + torch.arange(query.shape[0])).unsqueeze(1)
    weights = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
    return torch.einsum("hnk,khd->nhd", weights, values).float()


class Pool:
    """Requests scattered over a pool whose unused slots are NaN."""

    def __init__(self, lengths: list[int]) -> None:
        generator = torch.Generator().manual_seed(sum(lengths))
        self.lengths = torch.tensor(lengths)
        self.keys = torch.full((SLOTS, KV_HEADS, DIM), math.nan)
        self.values = torch.full((SLOTS, KV_HEADS, DIM), math.nan)
        order = torch.randperm(SLOTS - 1, generator=generator) + 1
        self.table = torch.zeros(len(lengths) + 2, SLOTS, dtype=torch.int32)
        self.rows = torch.arange(len(lengths)).flip(0) + 1
        used = 0
        for row, length in zip(self.rows.tolist(), lengths, strict=True):
            slots = order[used : used + length]
            used += length
            self.table[row, :length] = slots.int()
            self.keys[slots] = torch.randn(length, KV_HEADS, DIM, generator=generator)
            self.values[slots] = torch.randn(length, KV_HEADS, DIM, generator=generator)

    def expected(self, query: torch.Tensor, prefixes: list[int]) -> torch.Tensor:
        parts, start = [], 0
        for row, length, prefix in zip(self.rows.tolist(), self.lengths.tolist(), prefixes, strict=True):
            slots = self.table[row, :length].long()
            part = query[start : start + length - prefix]
            parts.append(reference(part, self.keys[slots], self.values[slots], prefix))
            start += length - prefix
        return torch.cat(parts)


@pytest.mark.parametrize("lengths", [[5], [1, 1], [7, 30, 2, 19], [50] * 5])
def test_decode(lengths: list[int]) -> None:
    pool = Pool(lengths)
    query = torch.randn(len(lengths), HEADS, DIM, generator=torch.Generator().manual_seed(1))
    output = torch.full_like(query, math.nan)
    attention.decode(
        None, query, output, pool.keys, pool.values, pool.table, pool.rows, pool.lengths, scaling=DIM**-0.5
    )
    torch.testing.assert_close(output, pool.expected(query, [n - 1 for n in lengths]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("lengths", "prefixes"),
    [([9], [0]), ([9, 12], [8, 11]), ([9, 12, 30], [0, 5, 29]), ([1], [0]), ([40, 1], [3, 0])],
)
def test_extend(lengths: list[int], prefixes: list[int]) -> None:
    pool = Pool(lengths)
    new = torch.tensor(lengths) - torch.tensor(prefixes)
    query = torch.randn(int(new.sum()), HEADS, DIM, generator=torch.Generator().manual_seed(2))
    output = torch.full_like(query, math.nan)
    attention.extend(
        None,
        query,
        output,
        pool.keys,
        pool.values,
        pool.table,
        pool.rows,
        pool.lengths,
        torch.tensor(prefixes),
        new,
        scaling=DIM**-0.5,
        enable_gqa=True,
    )
    torch.testing.assert_close(output, pool.expected(query, prefixes), atol=1e-5, rtol=0)


@pytest.mark.parametrize("bounds", [[0, 0, 8], [0, 4, 8, 12], [0, 4, 6, 10, 12, 13], [0, 16, 24, 40]])
def test_vision_attends_within_segments(bounds: list[int]) -> None:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(bounds[-1], HEADS, DIM, generator=generator) for _ in range(3))

    class Layer:
        scale = DIM**-0.5

    output = attention.vision(Layer(), q, k, v, 1, cu_seqlens=torch.tensor(bounds, dtype=torch.int32))
    segment = torch.bucketize(torch.arange(bounds[-1]), torch.tensor(bounds), right=True)
    scores = torch.einsum("nhd,khd->hnk", q, k) * Layer.scale
    weights = scores.masked_fill(segment.unsqueeze(1) != segment.unsqueeze(0), -torch.inf).softmax(-1)
    torch.testing.assert_close(output, torch.einsum("hnk,khd->nhd", weights, v), atol=1e-5, rtol=0)
