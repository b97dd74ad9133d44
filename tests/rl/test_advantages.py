"""Advantages against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollplex_cli.rl.advantages import group_advantages


def test_by_hand() -> None:
    """mean 2, deviations -2, 0, 2, sample variance (4 + 0 + 4) / 2 = 4, std 2."""
    result = group_advantages([0.0, 2.0, 4.0], 0.5)
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx([-2 / 2.5, 0.0, 2 / 2.5])


def test_two_responses_by_hand() -> None:
    """Deviations -0.5 and 0.5, sample std sqrt(0.5)."""
    assert group_advantages([0, 1], 0.0).tolist() == pytest.approx([-0.5 / math.sqrt(0.5), 0.5 / math.sqrt(0.5)])


@given(reward=st.floats(-10, 10), count=st.integers(2, 17))
def test_equal_rewards_have_zero_advantage(reward: float, count: int) -> None:
    assert group_advantages([reward] * count, 1e-12).tolist() == [0.0] * count


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=16))
def test_advantages_sum_to_zero_and_keep_the_order(rewards: list[float]) -> None:
    result = group_advantages(rewards, 1e-4)
    assert abs(float(result.sum())) < 1e-4
    ranked = result[sorted(range(len(rewards)), key=rewards.__getitem__)]
    assert (ranked.diff() >= 0).all()


def test_a_single_response_is_refused() -> None:
    with pytest.raises(ValueError, match="at least two responses, not 1"):
        group_advantages([1.0], 1e-4)
