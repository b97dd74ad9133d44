"""Advantages of a group of responses to one prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def group_advantages(rewards: Sequence[float], epsilon: float) -> torch.Tensor:
    """GRPO's advantages, (r - mean) / (std + epsilon), [G] float32 (DeepSeekMath, section 4.1.2).

    `std` is the sample standard deviation (divisor G - 1), as TRL computes it; the paper does not say which.
    A group whose rewards are all equal has advantages of exactly zero. Computed in float64.
    Raises ValueError for fewer than two rewards: nothing can be compared.
    """
    if len(rewards) < 2:
        raise ValueError(f"group advantages need at least two responses, not {len(rewards)}")
    values = torch.tensor(list(rewards), dtype=torch.float64)
    # The mean of equal numbers can miss them by a rounding that a small epsilon would blow up.
    if bool((values == values[0]).all()):
        return torch.zeros(len(rewards))
    return ((values - values.mean()) / (values.std() + epsilon)).to(torch.float32)
