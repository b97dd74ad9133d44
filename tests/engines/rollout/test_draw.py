"""Seeded sampling: right distribution, and noise that belongs to (seed, position, token)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.engines.rollout.sampling.draw import draw, exponentials, restrict


def rows(count: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + count, dtype=torch.int64)


def test_noise_is_exponential() -> None:
    noise = exponentials(rows(2000), torch.zeros(2000, dtype=torch.int64), 100).double()
    assert noise.min() > 0
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 1) < 0.01
    assert abs(float(noise.var()) - 1) < 0.03
    for level in (0.01, 0.1, 1.0, 3.0):
        share = float((noise > level).double().mean())
        assert abs(share - float(torch.tensor(-level).exp())) < 0.005


@pytest.mark.parametrize("axis", ["seed", "position", "token"])
def test_neighbouring_noise_is_uncorrelated(axis: str) -> None:
    """Adjacent seeds, positions and tokens are what a step really uses."""
    if axis == "seed":
        noise = exponentials(rows(400), torch.full((400,), 7), 300)
        a, b = noise[:-1], noise[1:]
    elif axis == "position":
        noise = exponentials(torch.full((400,), 7), rows(400), 300)
        a, b = noise[:-1], noise[1:]
    else:
        noise = exponentials(rows(400), rows(400), 300)
        a, b = noise[:, :-1], noise[:, 1:]
    correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
    assert abs(float(correlation)) < 0.01
    if axis == "token":
        return
    # A row must not be its neighbour moved by one token either.
    shifted = torch.corrcoef(torch.stack([a[:, 1:].flatten(), b[:, :-1].flatten()]))[0, 1]
    assert abs(float(shifted)) < 0.01


def test_high_seed_bits_count() -> None:
    low = exponentials(torch.tensor([5]), torch.tensor([0]), 50)
    high = exponentials(torch.tensor([5 + 2**40]), torch.tensor([0]), 50)
    assert not torch.equal(low, high)


def test_frequencies_follow_the_distribution() -> None:
    """Pearson's chi-square over 50,000 draws; 11 degrees of freedom, 0.999 quantile 31.3."""
    probs = torch.tensor([0.3, 0.2, 0.1, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.02, 0.015, 0.005])
    count = 50_000
    tokens = draw(probs.log().expand(count, -1).clone(), rows(count, 9000), torch.full((count,), 41))
    observed = torch.bincount(tokens, minlength=12).double()
    expected = probs.double() * count
    assert float(((observed - expected) ** 2 / expected).sum()) < 31.3


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(1, 6),
    vocab=st.integers(2, 40),
    seed=st.integers(0, 2**62),
    data=st.data(),
)
def test_a_row_does_not_depend_on_its_batch(n: int, vocab: int, seed: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    logprobs = torch.randn(n, vocab, generator=generator).log_softmax(-1)
    seeds = torch.tensor([seed + i for i in range(n)])
    positions = torch.tensor([data.draw(st.integers(0, 5000)) for _ in range(n)])
    top_p = torch.tensor([data.draw(st.sampled_from([0.2, 0.7, 1.0])) for _ in range(n)])
    top_k = torch.tensor([data.draw(st.sampled_from([1, 3, 2**30])) for _ in range(n)])
    together = draw(restrict(logprobs, top_p, top_k), seeds, positions)
    for i in range(n):
        row = slice(i, i + 1)
        alone = draw(restrict(logprobs[row], top_p[row], top_k[row]), seeds[row], positions[row])
        assert int(alone) == int(together[i])
        if top_p[i] == 1 and top_k[i] > vocab:
            assert int(draw(logprobs[row], seeds[row], positions[row])) == int(together[i])


def test_impossible_tokens_are_never_drawn() -> None:
    logprobs = torch.tensor([[-torch.inf, 0.0, -torch.inf, -30.0]]).expand(5000, -1).clone()
    assert set(draw(logprobs, rows(5000), rows(5000)).tolist()) == {1}


def test_restrict_keeps_the_nucleus() -> None:
    probs = torch.tensor([[0.1, 0.5, 0.15, 0.25]])
    everything = torch.tensor([2**30])

    def kept(top_p: float, top_k: torch.Tensor = everything) -> list[int]:
        allowed = restrict(probs.log(), torch.tensor([top_p]), top_k)
        unchanged = allowed.isfinite()
        assert torch.equal(allowed[unchanged], probs.log()[unchanged])
        return unchanged[0].nonzero().flatten().tolist()

    assert kept(1.0) == [0, 1, 2, 3]
    assert kept(0.4) == [1]
    assert kept(0.6) == [1, 3]
    assert kept(0.8) == [1, 2, 3]
    assert kept(1e-6) == [1]
    assert kept(1.0, torch.tensor([2])) == [1, 3]
    assert kept(0.6, torch.tensor([1])) == [1]


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [300, 9001, 152_064])
def test_the_kernel_draws_what_pytorch_draws(num_tokens: int) -> None:
    """Same hash, same noise: but for ties after rounding, the same token."""
    count = 64
    generator = torch.Generator().manual_seed(0)
    logprobs = torch.log_softmax(2 * torch.randn(count, num_tokens, generator=generator), dim=-1)
    logprobs[:, 7] = -torch.inf
    seeds = torch.randint(0, 2**62, (count,), generator=generator)
    positions = torch.randint(0, 5000, (count,), generator=generator)
    on_gpu = draw(logprobs.cuda(), seeds.cuda(), positions.cuda()).cpu()
    assert int((on_gpu == draw(logprobs, seeds, positions)).sum()) >= count - 1
