"""What each algorithm adds to the loss, against numbers worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from rollplex_cli.profile.load import parse_profile
from rollplex_cli.rl.losses import LossSettings, policy_loss

LN2 = math.log(2)


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def plain(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def settings_of(name: str, **more: Any) -> LossSettings:
    """What a profile with `algorithm.name` gives the loss."""
    sets = [f"algorithm.{key}={value}" for key, value in more.items()]
    text = f"name: x\ntask: {{name: shapes}}\nmodel: {{config: tiny}}\nalgorithm: {{name: {name}}}\n"
    return LossSettings.from_profile(parse_profile(text, "x", [*sets, "rollout.max_new_tokens=10"]).algorithm, 10)


def gradient(result: Any, logprobs: torch.Tensor) -> list[float]:
    result.loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad.tolist()


def test_normalizers_by_hand() -> None:
    """Advantages 2 over 3 tokens and -1 over 1, on policy. Token sum -6 + 1 over 4 tokens; response means -2 and 1
    over 2; response sums -6 and 1 over 2; the same over 2 * 10."""
    for name, loss, weight, grad in (
        ("tokens", -5.0, 4, [-2.0, -2.0, -2.0, 1.0]),
        ("responses", -1.0, 2, [-2 / 3, -2 / 3, -2 / 3, 1.0]),
        ("sequences", -5.0, 2, [-2.0, -2.0, -2.0, 1.0]),
        ("constant", -5.0, 20, [-2.0, -2.0, -2.0, 1.0]),
    ):
        logprobs = leaf(-1.0, -2.0, -0.5, -1.0)
        options = LossSettings(loss_normalizer=name, max_tokens=10)  # type: ignore[arg-type]
        result = policy_loss(logprobs, None, plain(2.0, -1.0), None, [3, 1], options)
        assert (result.loss.item(), result.weight) == (pytest.approx(loss), weight), name
        assert gradient(result, logprobs) == pytest.approx(grad), name


def test_gspo_by_hand() -> None:
    """Response 1: log-ratios ln 2 and 0, mean ln(2)/2, ratio sqrt 2; response 2: 0, ratio 1. Advantages 1 and -1.
    Without a cut the loss is -(sqrt 2) + 1; each token of response 1 gets sqrt(2) / 2 of the gradient."""
    logprobs, old = leaf(-1.0 + LN2, -1.0, -2.0), plain(-1.0, -1.0, -2.0)
    wide = settings_of("gspo", clip_low=0.9, clip_high=9)
    assert wide.ratio == "sequence" and wide.loss_normalizer == "responses"
    result = policy_loss(logprobs, old, plain(1.0, -1.0), None, [2, 1], wide)
    assert result.loss.item() == pytest.approx(-math.sqrt(2) + 1)
    assert result.weight == 2
    assert gradient(result, logprobs) == pytest.approx([-math.sqrt(2) / 2, -math.sqrt(2) / 2, 1.0])
    # With the paper's limits the first response is cut as a whole.
    cut_leaf = leaf(-1.0 + LN2, -1.0, -2.0)
    cut = policy_loss(cut_leaf, old, plain(1.0, -1.0), None, [2, 1], settings_of("gspo"))
    assert cut.loss.item() == pytest.approx(-1.0004 + 1)
    assert gradient(cut, cut_leaf) == pytest.approx([0.0, 0.0, 1.0])
    assert cut.metrics["clipped"] == 2


def test_cispo_by_hand() -> None:
    """Ratios 8, 2 and 1/8 with weights up to 5: 5, 2, 1/8, each times advantage times log p; no gradient is lost."""
    old = plain(-3.0, -3.0, -3.0)
    logprobs = leaf(-3.0 + 3 * LN2, -3.0 + LN2, -3.0 - 3 * LN2)
    settings = settings_of("cispo")
    result = policy_loss(logprobs, old, plain(1.0, 2.0, -1.0), None, [1, 1, 1], settings)
    values = logprobs.detach().tolist()
    assert result.loss.item() == pytest.approx(-5 * values[0] - 4 * values[1] + values[2] / 8)
    assert gradient(result, logprobs) == pytest.approx([-5.0, -4.0, 1 / 8])
    assert result.metrics["clipped"] == 1


def test_dapo_clips_higher() -> None:
    """Ratio 2 is cut at 1.28 upwards and at 0.8 downwards."""
    old, ratios = plain(-1.0, -1.0), (2.0, 0.5)
    logprobs = torch.tensor([math.log(r) - 1 for r in ratios], dtype=torch.float64, requires_grad=True)
    result = policy_loss(logprobs, old, plain(1.0, -1.0), None, [1, 1], settings_of("dapo"))
    assert result.loss.item() == pytest.approx(-1.28 + 0.8)
    assert result.weight == 2


def test_rloo_and_dr_grpo_are_sums_over_the_response() -> None:
    for name, weight in (("rloo", 2), ("dr_grpo", 20)):
        logprobs = leaf(-1.0, -2.0, -0.5)
        result = policy_loss(logprobs, None, plain(0.5, -0.5), None, [2, 1], settings_of(name))
        assert gradient(result, logprobs) == [-0.5, -0.5, 0.5]
        assert result.weight == weight


def test_kl_in_the_reward_leaves_the_loss_alone() -> None:
    assert settings_of("rloo", kl_coef=0.3).kl_coef == 0.0
    assert settings_of("grpo", kl_coef=0.3).kl_coef == 0.3
    assert settings_of("reinforce_pp", kl_coef=0.3).kl_estimator == "k2"


def test_importance_cap_by_hand() -> None:
    """Trainer over rollout 2, 1/2 and 8, capped at 3: the terms -1 each times 2, 1/2, 3; KL is not weighted."""
    logprobs = leaf(-1.0, -2.0, -3.0)
    rollout = plain(-1.0 - LN2, -2.0 + LN2, -3.0 - 3 * LN2)
    reference = plain(-1.0 - 1.0, -2.0, -3.0)
    settings = LossSettings(importance_cap=3.0, kl_coef=0.5, kl_estimator="k1")
    result = policy_loss(logprobs, None, plain(1.0, 1.0, 1.0), reference, [1, 1, 1], settings, rollout_logprobs=rollout)
    assert result.loss.item() == pytest.approx(-5.5 + 0.5)
    assert gradient(result, logprobs) == pytest.approx([-2 + 0.5, -0.5 + 0.5, -3 + 0.5])
    assert result.metrics["importance"].item() == pytest.approx(5.5)
    with pytest.raises(ValueError, match="needs the rollout's log-probs"):
        policy_loss(logprobs, None, plain(1.0, 1.0, 1.0), reference, [1, 1, 1], settings)


def test_entropy_gradient_is_right_in_expectation() -> None:
    """The estimate's gradient, averaged over all tokens with their probabilities, is that of the entropy."""
    logits = torch.tensor([0.3, -1.0, 0.8], dtype=torch.float64, requires_grad=True)
    exact = torch.autograd.grad(-(logits.softmax(0) * logits.log_softmax(0)).sum(), logits)[0]
    mean = torch.zeros(3, dtype=torch.float64)
    for token, p in enumerate(logits.softmax(0).tolist()):
        logprobs = logits.log_softmax(0)[token : token + 1]
        result = policy_loss(logprobs, None, plain(0.0), None, [1], LossSettings(entropy_coef=1.0))
        assert result.loss.item() == pytest.approx(math.log(p))
        mean += p * torch.autograd.grad(result.loss, logits)[0]
    assert torch.allclose(-mean, exact, atol=1e-12)


def test_masked_tokens_count_nowhere() -> None:
    """The middle response is cut away, and one token of the last."""
    mask = torch.tensor([True, True, False, False, True])
    reference = plain(-1.5, -2.5, 0.0, 0.0, -1.5)
    for normalizer, weight, grad in (
        ("tokens", 3, [-2.0, -2.0, 0.0, 0.0, -3.0]),
        ("responses", 2, [-1.0, -1.0, 0.0, 0.0, -3.0]),
    ):
        logprobs = leaf(-1.0, -2.0, -9.0, -9.0, -1.0)
        options = LossSettings(loss_normalizer=normalizer)  # type: ignore[arg-type]
        result = policy_loss(logprobs, None, plain(2.0, 5.0, 3.0), reference, [2, 1, 2], options, mask=mask)
        assert result.weight == weight
        assert gradient(result, logprobs) == pytest.approx(grad)
        assert result.metrics["tokens"] == 3
        assert result.metrics["kl"].item() == pytest.approx(3 * (math.exp(-0.5) - 1 + 0.5))


def test_a_sequence_ratio_over_masked_tokens_is_that_of_the_others() -> None:
    logprobs, old = leaf(-1.0 + LN2, -1.0), plain(-1.0, -5.0)
    mask = torch.tensor([True, False])
    options = LossSettings(ratio="sequence", loss_normalizer="responses", clip_high=9.0)
    result = policy_loss(logprobs, old, plain(1.0), None, [2], options, mask=mask)
    assert result.loss.item() == pytest.approx(-2.0)


def test_everything_masked_is_zero_and_differentiable() -> None:
    for normalizer in ("tokens", "responses", "sequences", "constant"):
        logprobs = leaf(-1.0, -2.0)
        options = LossSettings(loss_normalizer=normalizer)  # type: ignore[arg-type]
        result = policy_loss(logprobs, None, plain(1.0), None, [2], options, mask=torch.tensor([False, False]))
        assert (result.loss.item(), result.weight) == (0.0, 0)
        assert gradient(result, logprobs) == [0.0, 0.0]
