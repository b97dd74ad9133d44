"""Drawing tokens so that a response depends on its own seed only.

Method: Gumbel-max (Gumbel 1954; Maddison et al. 2014). With E_v ~ Exp(1) independent, argmax_v p_v / E_v has
distribution p. The exponentials come from a counter-based hash of (seed, position, token id), so the noise of a token
is the same whoever else is in the batch.
"""

from __future__ import annotations

from functools import lru_cache

import torch

_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def _int32(constant: int) -> int:
    """An unsigned 32-bit constant as the signed one of the same bits."""
    return constant - (1 << 32) if constant >= 1 << 31 else constant


def _mix_(x: torch.Tensor) -> torch.Tensor:
    """Mix int32 in place: a bijection with good avalanche. Products wrap; shifts are made logical by a mask.

    Constants: C. Wellons' search for low-bias integer hashes (`lowbias32`).
    """
    x ^= (x >> 16) & 0xFFFF
    x *= _int32(0x7FEB352D)
    x ^= (x >> 15) & 0x1FFFF
    x *= _int32(0x846CA68B)
    x ^= (x >> 16) & 0xFFFF
    return x


@lru_cache(maxsize=8)
def _token_bits(num_tokens: int, device: torch.device) -> torch.Tensor:
    """One well-mixed int32 per token id, [num_tokens]."""
    ids = torch.arange(num_tokens, dtype=torch.int32, device=device)
    return _mix_(ids * _int32(0x9E3779B1) + _int32(0x85EBCA6B))


def exponentials(seeds: torch.Tensor, positions: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Exp(1) noise [n, num_tokens] float32 for rows of (seed, position), each int64 [n].

    A value depends on its seed, position and token id only. 31 random bits per value.
    """
    row = _mix_(_low32(seeds) ^ _int32(0x9E3779B9))
    row = _mix_(row ^ _low32(seeds >> 32))
    row = _mix_(row + _low32(positions))
    # Token ids are mixed before they meet the row: rows must not be shifted copies of one another.
    bits = _mix_(_token_bits(num_tokens, seeds.device).unsqueeze(0) ^ row.unsqueeze(1))
    bits &= 0x7FFFFFFF
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=_LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_()


def _low32(x: torch.Tensor) -> torch.Tensor:
    low = x & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)


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
    if logprobs.is_cuda:
        from rollplex_cli.engines.rollout.sampling import kernel

        return kernel.draw(logprobs, seeds, positions)
    noise = exponentials(seeds, positions, logprobs.shape[-1])
    return (logprobs - noise.log_()).argmax(dim=-1)
