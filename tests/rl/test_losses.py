"""The loss against numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rollplex_cli.rl.losses import LossSettings, kl_terms, policy_loss


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def plain(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_on_policy_gradient_is_minus_advantage_per_token() -> None:
    logprobs = leaf(-1.0, -2.0, -0.5)
    result = policy_loss(logprobs, None, torch.tensor([2.0, -1.0]), None, [2, 1], LossSettings())
    assert result.loss.item() == pytest.approx(-2 - 2 + 1)
    result.loss.backward()
    assert logprobs.grad is not None and logprobs.grad.tolist() == [-2.0, -2.0, 1.0]
    assert result.weight == 3
    assert result.metrics["ratio"] == 3 and result.metrics["clipped"] == 0 and result.metrics["tokens"] == 3


def test_clipping_by_hand() -> None:
    """Ratios 2, 0.5, 2, 0.5 under advantages 1, 1, -1, -1 and limits [0.8, 1.3]: only moves that would raise the
    objective beyond a limit are cut, the first to 1.3 and the last to 0.8."""
    old = plain(-1.0, -1.0, -1.0, -1.0)
    new = torch.tensor([math.log(r) - 1 for r in (2.0, 0.5, 2.0, 0.5)], dtype=torch.float64, requires_grad=True)
    options = LossSettings(clip_low=0.2, clip_high=0.3)
    result = policy_loss(new, old, torch.tensor([1.0, 1.0, -1.0, -1.0]), None, [1, 1, 1, 1], options)
    assert result.loss.item() == pytest.approx(-1.3 - 0.5 + 2.0 + 0.8)
    result.loss.backward()
    assert new.grad is not None and new.grad.tolist() == pytest.approx([0.0, -0.5, 2.0, 0.0])
    assert result.metrics["clipped"] == 2 and result.metrics["ratio"].item() == pytest.approx(5.0)


def test_kl_estimators_by_hand() -> None:
    """log p - log q = ln 2, so q / p = 1/2."""
    policy, reference = plain(math.log(0.5)), plain(math.log(0.25))
    ln2 = math.log(2)
    assert kl_terms(policy, reference, "k1").item() == pytest.approx(ln2)
    assert kl_terms(policy, reference, "k2").item() == pytest.approx(ln2**2 / 2)
    assert kl_terms(policy, reference, "k3").item() == pytest.approx(0.5 - 1 + ln2)


def test_k3_is_never_negative_and_unbiased() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64)
    terms = kl_terms(p.log(), q.log(), "k3")
    assert (terms >= 0).all()
    exact = (p * (p / q).log()).sum()
    assert (p * terms).sum().item() == pytest.approx(exact.item())
    assert (p * kl_terms(p.log(), q.log(), "k1")).sum().item() == pytest.approx(exact.item())


def test_kl_term_in_the_loss() -> None:
    logprobs, reference = leaf(math.log(0.5)), plain(math.log(0.25))
    result = policy_loss(logprobs, None, torch.tensor([0.0]), reference, [1], LossSettings(kl_coef=0.1))
    assert result.loss.item() == pytest.approx(0.1 * (math.log(2) - 0.5))
    result.loss.backward()
    # d/dx of exp(r - x) - (r - x) - 1 is 1 - q / p.
    assert logprobs.grad is not None and logprobs.grad.item() == pytest.approx(0.1 * 0.5)
    assert result.metrics["kl"].item() == pytest.approx(math.log(2) - 0.5)
    assert result.metrics["kl_loss"].item() == pytest.approx(0.1 * (math.log(2) - 0.5))


def test_kl_is_reported_without_a_coefficient() -> None:
    result = policy_loss(leaf(-1.0), None, torch.tensor([1.0]), plain(-2.0), [1], LossSettings(kl_estimator="k1"))
    assert result.loss.item() == -1.0 and result.metrics["kl"] == 1.0 and result.metrics["kl_loss"] == 0.0


@pytest.mark.parametrize(("normalizer", "expected"), [("tokens", (-3 * 1.0 + 2.0 - 4.0) / 6), ("responses", -1 / 3)])
def test_normalisers_over_two_groups(normalizer: str, expected: float) -> None:
    """Group A: lengths 3 and 1, advantages 1 and -2; group B: length 2, advantage 2.
    By tokens: (-3 + 2 - 4) / 6. By responses: (-1 + 2 - 2) / 3."""
    options = LossSettings(loss_normalizer=normalizer)  # type: ignore[arg-type]
    first = policy_loss(leaf(0, 0, 0, 0), None, torch.tensor([1.0, -2.0]), None, [3, 1], options)
    second = policy_loss(leaf(0, 0), None, torch.tensor([2.0]), None, [2], options)
    total = (first.loss + second.loss).item() / (first.weight + second.weight)
    assert total == pytest.approx(expected)


def test_misuse() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        policy_loss(leaf(0, 0), None, torch.tensor([1.0]), None, [3], LossSettings())
    with pytest.raises(ValueError, match="reference"):
        policy_loss(leaf(0.0), None, torch.tensor([1.0]), None, [1], LossSettings(kl_coef=0.1))
