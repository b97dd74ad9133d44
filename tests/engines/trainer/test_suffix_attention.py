"""Both ways to compute attention behind a shared prefix, against each other."""

from __future__ import annotations

import pytest
import torch

from rollplex_cli.engines.trainer.model.attention import folded_bias
from rollplex_cli.engines.trainer.model.flash import bounds_of, flash_runs
from rollplex_cli.engines.trainer.model.language import KeyValue
from rollplex_cli.engines.trainer.model.suffix_attention import _Flash, _Masked, suffix_attention

HEADS, KV_HEADS, DIM = 8, 2, 64


def inputs(lengths: list[int], prefix: int, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(sum(lengths) + prefix)
    rows = sum(lengths)
    shapes = [(HEADS, rows), *[(KV_HEADS, prefix)] * 2, *[(KV_HEADS, rows)] * 2]
    return [
        torch.randn(1, heads, n, DIM, generator=generator, device=device, dtype=dtype).requires_grad_()
        for heads, n in shapes
    ]


def segments_of(lengths: list[int], device: str) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device)


def by_hand(tensors: list[torch.Tensor], lengths: list[int]) -> torch.Tensor:
    """One response at a time, prefix and response in one causal sequence, in float32."""
    q, prefix_k, prefix_v, own_k, own_v = (t.float() for t in tensors)
    outs, start = [], 0
    for length in lengths:
        rows = slice(start, start + length)
        start += length
        k = torch.cat((prefix_k, own_k[:, :, rows]), dim=2).repeat_interleave(HEADS // KV_HEADS, dim=1)
        v = torch.cat((prefix_v, own_v[:, :, rows]), dim=2).repeat_interleave(HEADS // KV_HEADS, dim=1)
        mask = torch.ones(length, k.shape[2], dtype=torch.bool, device=q.device).tril(prefix_k.shape[2])
        scores = (q[:, :, rows] @ k.transpose(2, 3) / DIM**0.5).masked_fill(~mask, -torch.inf)
        outs.append(scores.softmax(-1) @ v)
    return torch.cat(outs, dim=2).transpose(1, 2).flatten(2)


def test_the_masked_way_is_attention_per_response() -> None:
    lengths = [3, 1, 5]
    tensors = inputs(lengths, 7, "cpu", torch.float32)
    attend = suffix_attention(lengths, segments_of(lengths, "cpu"), 7, HEADS // KV_HEADS, torch.float32)
    out = attend(tensors[0], KeyValue(*tensors[1:3]), KeyValue(*tensors[3:]))
    torch.testing.assert_close(out, by_hand(tensors, lengths), atol=1e-6, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(("lengths", "prefix"), [([3, 1, 5], 7), ([130, 1, 257, 64], 1111), ([4, 4], 0)])
def test_the_flash_way_gives_the_same_values_and_gradients(lengths: list[int], prefix: int) -> None:
    found = []
    for exact in (True, False):
        tensors = inputs(lengths, prefix, "cuda", torch.bfloat16)
        if exact:
            out = by_hand(tensors, lengths)
        else:
            attend = suffix_attention(lengths, segments_of(lengths, "cuda"), prefix, HEADS // KV_HEADS, torch.bfloat16)
            assert isinstance(attend, _Flash)
            out = attend(tensors[0], KeyValue(*tensors[1:3]), KeyValue(*tensors[3:]))
        weights = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape)
        (out.float() * weights).sum().backward()
        found.append([out.detach().float(), *(t.grad.float() for t in tensors if t.grad is not None)])
    for expected, value in zip(*found, strict=True):
        if expected.numel():
            assert float((value - expected).norm() / expected.norm()) < 0.02


@pytest.mark.gpu
def test_the_masked_way_agrees_on_the_gpu() -> None:
    lengths, prefix = [130, 1, 257, 64], 1111
    tensors = inputs(lengths, prefix, "cuda", torch.bfloat16)
    bias = folded_bias(segments_of(lengths, "cuda"), prefix, HEADS // KV_HEADS, torch.bfloat16)
    out = _Masked(bias)(tensors[0], KeyValue(*tensors[1:3]), KeyValue(*tensors[3:]))
    expected, out = by_hand(tensors, lengths).detach(), out.detach()
    assert float((out.float() - expected).norm() / expected.norm()) < 0.02


@pytest.mark.gpu
def test_runs_attend_to_themselves() -> None:
    lengths = [352, 64, 16, 352]
    tensors = [torch.randn(sum(lengths), 4, 80, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    out = flash_runs(*tensors, bounds_of(lengths, lengths, torch.device("cuda")))
    runs = zip(*(t.float().transpose(0, 1).split(lengths, dim=1) for t in tensors), strict=True)
    expected = torch.cat([torch.nn.functional.scaled_dot_product_attention(*run) for run in runs], dim=1)
    expected = expected.transpose(0, 1)
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape)
    found = torch.autograd.grad((out.float() * weights).sum(), tensors)
    wanted = torch.autograd.grad((expected * weights).sum(), tensors)
    for value, reference in zip((out, *found), (expected, *wanted), strict=True):
        error = (value.detach().float() - reference.detach().float()).norm() / reference.detach().float().norm()
        assert float(error) < 0.02
