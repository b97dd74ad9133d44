"""The policy loss.

Differences from GRPO as published (DeepSeekMath, equation 3):

1. The loss is the SUM over tokens of a group; the normaliser is applied to the accumulated gradient when the whole
   batch is known. `tokens` divides by all response tokens of the step (DAPO, equation 8); `responses` is the
   published mean of per-response means.
2. The lower and upper clip limits may differ (DAPO's clip-higher).
3. The KL estimator is a choice: k1, k2, k3 of Schulman's note; the paper uses k3. As a loss, k1's gradient is that
   of log p alone, with zero mean under the policy: it regularises nothing in expectation; k2's is the KL's gradient.
4. With one update per batch, old log-probs are the trainer's own of the same forward: the ratio is exactly 1 and
   its gradient that of log p.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

KlEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What of the profile's `algorithm` section the loss needs; same names and meanings."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    loss_normalizer: Literal["tokens", "responses"] = "tokens"
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossResult:
    """Loss of one group before normalisation.

    The step's loss is sum(loss) / sum(weight) over its groups, so gradients are scaled by 1 / sum(weight).
    """

    loss: torch.Tensor
    """Scalar, differentiable."""
    weight: int
    """What this group adds to the normaliser: its tokens or its responses."""
    metrics: dict[str, torch.Tensor]
    """Detached scalars, all sums over the group's tokens: `tokens`, `policy_loss` and `kl_loss` (parts of the loss),
    `kl` (the estimator, uncoefficiented), `ratio`, `clipped` (tokens whose ratio was cut)."""


def kl_terms(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Per-token estimates of KL(policy || reference) from samples of the policy (Schulman, "Approximating KL
    divergence"): k1 = log p - log q, k2 = (log p - log q)^2 / 2, k3 = q/p - 1 - log(q/p)."""
    difference = logprobs - ref_logprobs
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference * difference
    return torch.exp(-difference) - 1 + difference


def policy_loss(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor | None,
    advantages: torch.Tensor,
    ref_logprobs: torch.Tensor | None,
    lengths: Sequence[int],
    settings: LossSettings,
) -> LossResult:
    """Clipped policy-gradient loss with an optional KL term.

    Args:
        logprobs: [S] of the sampled tokens under the policy, packed response by response; differentiable.
        old_logprobs: [S] under the sampling policy; None takes `logprobs` themselves, without gradient.
        advantages: [G], one per response.
        ref_logprobs: [S] under the reference; None leaves the KL term out (then `kl_coef` must be 0).
        lengths: tokens per response, summing to S.
        settings: clip limits, KL and normaliser.

    Raises ValueError where shapes disagree or KL is asked for without a reference.
    """
    if sum(lengths) != logprobs.shape[0] or len(lengths) != advantages.shape[0]:
        raise ValueError(
            f"lengths {tuple(lengths)} do not fit {logprobs.shape[0]} tokens, {len(advantages)} advantages"
        )
    if settings.kl_coef and ref_logprobs is None:
        raise ValueError("a KL coefficient needs reference log-probs")
    counts = torch.tensor(list(lengths), device=logprobs.device)
    spread = torch.repeat_interleave(advantages.to(logprobs), counts)
    old = logprobs.detach() if old_logprobs is None else old_logprobs.to(logprobs)
    ratio = torch.exp(logprobs - old)
    cut = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    terms = -torch.minimum(ratio * spread, cut * spread)
    kl = torch.zeros_like(logprobs)
    if ref_logprobs is not None:
        kl = kl_terms(logprobs, ref_logprobs.to(logprobs), settings.kl_estimator)
    by_response = settings.loss_normalizer == "responses"
    share = torch.repeat_interleave(1 / counts.to(logprobs), counts) if by_response else None
    policy_part = _sum(terms, share)
    kl_part = _sum(settings.kl_coef * kl, share) if settings.kl_coef else None
    clipped = cut * spread < ratio * spread
    return LossResult(
        loss=policy_part if kl_part is None else policy_part + kl_part,
        weight=len(lengths) if by_response else int(logprobs.shape[0]),
        metrics={
            "tokens": torch.tensor(float(logprobs.shape[0])),
            "policy_loss": policy_part.detach(),
            "kl_loss": torch.zeros_like(policy_part) if kl_part is None else kl_part.detach(),
            "kl": kl.detach().sum(),
            "ratio": ratio.detach().sum(),
            "clipped": clipped.sum().to(logprobs.dtype),
        },
    )


def _sum(terms: torch.Tensor, share: torch.Tensor | None) -> torch.Tensor:
    return terms.sum() if share is None else (terms * share).sum()
