"""Drawing tokens so that a response depends on its own seed only.

Method: Gumbel-max (Gumbel 1954; Maddison et al. 2014). With E_v ~ Exp(1) independent, argmax_v p_v / E_v has
distribution p. The exponentials come from a counter-based hash of (seed, position, token id), so the noise of a token
is the same whoever else is in the batch.
"""

from __future__ import annotations

import torch

_LOW32 = 0xFFFFFFFF
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit integers with good avalanche, on int64 tensors holding values in [0, 2^32).

    Constants: C. Wellons' search for low-bias integer hashes (`lowbias32`).
    """
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _LOW32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _LOW32
    return x ^ (x >> 16)


def exponentials(seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Exp(1) noise [n, num_tokens] float32 for rows of (seed, position), each int64 [n].

    A value depends on its seed, position and token id only. 32 random bits per value.
    """
    row = _mix32((seeds & _LOW32) ^ 0x9E3779B9)
    row = _mix32(row ^ ((seeds >> 32) & _LOW32))
    row = _mix32((row + positions) & _LOW32)
    tokens = torch.arange(num_tokens, dtype=torch.int64, device=seeds.device)
    # Two rounds keyed by the row: one alone would make rows shifted copies of one another.
    bits = _mix32(_mix32((row.unsqueeze(1) + tokens.unsqueeze(0) * 0x9E3779B1) & _LOW32) ^ row.unsqueeze(1))
    uniform = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)
    return torch.log1p(uniform.neg_()).neg_()


def restrict(logprobs: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """`logprobs` [n, V] with -inf outside each row's top-k (int [n]) and nucleus top-p (float [n]).

    The nucleus is the smallest set of most probable tokens whose probability reaches top_p; top-k cuts first, and
    neither renormalises the other. Ties are broken by token id, so a row's result is its own.
    """
    ordered, index = logprobs.sort(dim=-1, descending=True, stable=True)
    probs = ordered.exp()
    before = probs.cumsum(dim=-1) - probs
    rank = torch.arange(logprobs.shape[-1], device=logprobs.device)
    drop = (before >= top_p.unsqueeze(1)) | (rank.unsqueeze(0) >= top_k.unsqueeze(1))
    drop[:, 0] = False
    return logprobs.masked_fill(torch.zeros_like(drop).scatter_(1, index, drop), -torch.inf)


def draw(logprobs: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One token per row, int64 [n], from log-probabilities [n, V] float32 (-inf is never drawn)."""
    noise = exponentials(seeds, positions, logprobs.shape[-1])
    return (logprobs - noise.log_()).argmax(dim=-1)
