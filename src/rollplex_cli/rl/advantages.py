"""Advantages of a group of responses to one prompt, and what is taken off rewards before."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

Estimator = Literal["group_std", "group_mean", "leave_one_out", "batch_std"]


def advantages(
    rewards: Sequence[float], estimator: Estimator, epsilon: float, batch_std: float | None = None
) -> torch.Tensor:
    """Advantages of one group, [G] float32, computed in float64.

    With m the mean of the group's rewards r_1 .. r_G:

    - `group_std`: (r - m) / (s + epsilon), s the sample standard deviation (divisor G - 1) of the group. GRPO
      (DeepSeekMath, section 4.1.2; the paper does not say which deviation, TRL takes this one).
    - `group_mean`: r - m. Dr. GRPO (arXiv 2503.20783, section 3.2).
    - `leave_one_out`: r_i minus the mean of the others, which is G / (G - 1) (r_i - m). RLOO (arXiv 2402.14740,
      equation 8).
    - `batch_std`: (r - m) / (batch_std + epsilon). REINFORCE++ with baseline (arXiv 2501.03262); the mean over the
      batch, which the paper takes off too, is zero.

    A group whose rewards are all equal has advantages of exactly zero.
    Raises ValueError for fewer than two rewards (nothing can be compared) or `batch_std` without its number.
    """
    if len(rewards) < 2:
        raise ValueError(f"group advantages need at least two responses, not {len(rewards)}")
    if (estimator == "batch_std") is (batch_std is None):
        raise ValueError(f"a deviation of the batch belongs to `batch_std` alone, not to {estimator}")
    values = torch.tensor(list(rewards), dtype=torch.float64)
    # The mean of equal numbers can miss them by a rounding that a small epsilon would blow up.
    if bool((values == values[0]).all()):
        return torch.zeros(len(rewards))
    centred = values - values.mean()
    if estimator == "group_std":
        centred = centred / (values.std() + epsilon)
    elif estimator == "leave_one_out":
        centred = centred * (len(rewards) / (len(rewards) - 1))
    elif batch_std is not None:
        centred = centred / (batch_std + epsilon)
    return centred.to(torch.float32)


def group_advantages(rewards: Sequence[float], epsilon: float) -> torch.Tensor:
    """GRPO's advantages; see `advantages`."""
    return advantages(rewards, "group_std", epsilon)


def centred_square_sum(rewards: Sequence[float]) -> float:
    """Sum of (r - m)^2 over a group; adds up over groups and ranks for `deviation`."""
    mean = math.fsum(rewards) / len(rewards)
    return math.fsum((r - mean) ** 2 for r in rewards)


def deviation(square_sum: float, count: int) -> float:
    """Sample standard deviation of `count` numbers whose mean is zero, from the sum of their squares."""
    return math.sqrt(square_sum / (count - 1)) if count > 1 else 0.0


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """What a response of `num_tokens` adds to its reward: 0 up to `max_tokens - buffer_tokens`, falling linearly to
    -`penalty` at `max_tokens` (DAPO, equation 13). A buffer of 0 penalises nothing."""
    if not buffer_tokens:
        return 0.0
    over = num_tokens - (max_tokens - buffer_tokens)
    return -penalty * min(1.0, max(0, over) / buffer_tokens)


def kl_penalties(kl: torch.Tensor, lengths: Sequence[int], coef: float) -> list[float]:
    """What KL in the reward takes off each response: `coef` times the sum of its per-token estimates `kl` [S]."""
    return [coef * float(part.double().sum()) for part in kl.split(list(lengths))]
