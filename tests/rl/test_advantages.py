"""Advantages against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollplex_cli.rl.advantages import (
    Estimator,
    advantages,
    centred_square_sum,
    deviation,
    group_advantages,
    kl_penalties,
    overlong_penalty,
)


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


def test_other_baselines_by_hand() -> None:
    """Rewards 0, 2, 4: mean 2; the others' means are 3, 2, 1; deviations -2, 0, 2."""
    rewards = [0.0, 2.0, 4.0]
    assert advantages(rewards, "group_mean", 0.5).tolist() == [-2.0, 0.0, 2.0]
    assert advantages(rewards, "leave_one_out", 0.5).tolist() == pytest.approx([0 - 3.0, 2 - 2.0, 4 - 1.0])
    assert advantages(rewards, "batch_std", 0.5, batch_std=3.5).tolist() == [-0.5, 0.0, 0.5]


@pytest.mark.parametrize("estimator", ["group_std", "group_mean", "leave_one_out"])
def test_equal_rewards_have_zero_advantage_whatever_the_baseline(estimator: Estimator) -> None:
    assert advantages([0.1] * 3, estimator, 1e-12).tolist() == [0.0] * 3
    assert advantages([0.1] * 3, "batch_std", 1e-12, 0.0).tolist() == [0.0] * 3


def test_deviation_of_a_batch_by_hand() -> None:
    """Groups (0, 2, 4) and (1, 3): centred -2, 0, 2, -1, 1; squares sum to 10 over 5 numbers: sqrt(10 / 4)."""
    total = centred_square_sum([0.0, 2.0, 4.0]) + centred_square_sum([1.0, 3.0])
    assert total == 10.0
    assert deviation(total, 5) == pytest.approx(math.sqrt(2.5))
    assert deviation(0.0, 1) == 0.0


def test_a_deviation_belongs_to_its_estimator() -> None:
    for estimator, given_std in (("batch_std", None), ("group_std", 1.0)):
        with pytest.raises(ValueError, match="belongs to `batch_std` alone"):
            advantages([0.0, 1.0], estimator, 0.1, given_std)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 0.0), (80, 0.0), (81, -0.1), (90, -1.0), (100, -2.0), (120, -2.0)]
)
def test_overlong_penalty_by_hand(num_tokens: int, expected: float) -> None:
    """100 tokens at most, the last 20 of them cost up to 2."""
    assert overlong_penalty(num_tokens, 100, 20, 2.0) == pytest.approx(expected)
    assert overlong_penalty(num_tokens, 100, 0, 2.0) == 0.0


def test_kl_penalties_by_hand() -> None:
    assert kl_penalties(torch.tensor([0.5, 1.0, 2.0]), [2, 1], 0.1) == pytest.approx([0.15, 0.2])
