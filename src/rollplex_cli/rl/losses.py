"""The policy loss, for every algorithm: one formula with named options.

Differences from the published ones:

1. All: the loss is the SUM over a group; the normaliser is applied to the accumulated gradient when the whole batch is
   known. `tokens` divides by all response tokens of the update (DAPO, equation 8), `responses` is the mean of
   per-response means (GRPO, GSPO), `sequences` the mean of per-response sums (RLOO), `constant` that divided by the
   largest response length (Dr. GRPO, which divides by any constant). The profile's `grpo` takes `tokens` unless told
   otherwise.
2. GRPO (DeepSeekMath, equation 3): lower and upper clip limits may differ (DAPO's clip-higher). Advantages are
   constant over a response.
3. KL in the loss: the estimator is a choice of k1, k2, k3 (Schulman's note); GRPO uses k3, REINFORCE++ k2. As a
   loss, k1's gradient is that of log p alone, with zero mean under the policy: it regularises nothing in expectation;
   k2's is the KL's gradient. KL in the reward (RLOO) is summed over the response and is not differentiated.
4. With one update per batch, old log-probs are the trainer's own of the same forward: the ratio is exactly 1 and
   its gradient that of log p. RLOO and REINFORCE++ are then the plain policy gradient; with further updates they
   are clipped like PPO.
5. PPO (arXiv 1707.06347): no critic and no bootstrapping; minibatches are whole prompt groups, in a fixed order.
6. DAPO (arXiv 2503.14476): a group without signal is replaced as soon as it is complete, `max_refills` times at most
   (`runtime/groups/refills.py`); the paper samples whole batches until one is full.
7. GSPO (arXiv 2507.18071): as published (equation 5); with `loss_normalizer: tokens` long responses weigh more.
8. CISPO (arXiv 2506.13585, equation 4): a lower limit exists and is off at `clip_low: 1`.
9. Truncated importance sampling: min(p_trainer / p_rollout, cap) per token, of the sampling weights (both under the
   weights that sampled), as a constant factor of the policy term; KL and entropy terms are not weighted.
10. The entropy bonus is estimated from sampled tokens: its gradient is -log p times that of log p, whose expectation
    under the policy is the entropy's; its variance is larger than that of the exact one, its memory is nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex_cli.profile.sections.algorithm import AlgorithmProfile

KlEstimator = Literal["k1", "k2", "k3"]
Normalizer = Literal["tokens", "responses", "sequences", "constant"]
Ratio = Literal["token", "sequence", "cispo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What of the profile's `algorithm` section the loss needs; same names and meanings."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    ratio: Ratio = "token"
    loss_normalizer: Normalizer = "tokens"
    kl_coef: float = 0.0
    """Of the KL term in the loss; 0 where KL is in the reward."""
    kl_estimator: KlEstimator = "k3"
    importance_cap: float | None = None
    entropy_coef: float = 0.0
    max_tokens: int = 1
    """Largest response length, for the normaliser `constant`."""

    @classmethod
    def from_profile(cls, algorithm: AlgorithmProfile, max_new_tokens: int) -> LossSettings:
        """The settings of a profile."""
        return cls(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            ratio=algorithm.ratio,
            loss_normalizer=algorithm.loss_normalizer,
            kl_coef=algorithm.kl_coef if algorithm.kl_in == "loss" else 0.0,
            kl_estimator=algorithm.kl_estimator,
            importance_cap=algorithm.importance_cap,
            entropy_coef=algorithm.entropy_coef,
            max_tokens=max_new_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossResult:
    """Loss of one group before normalisation.

    The update's loss is sum(loss) / sum(weight) over its groups, so gradients are scaled by 1 / sum(weight).
    """

    loss: torch.Tensor
    """Scalar, differentiable."""
    weight: int
    """What this group adds to the normaliser: its tokens, its responses, or those times the largest length."""
    metrics: dict[str, torch.Tensor]
    """Detached scalars, all sums over the group's tokens: `tokens` (those that count), `policy_loss`, `kl_loss` and
    `entropy_loss` (parts of the loss), `kl` (the estimator, uncoefficiented), `ratio`, `clipped` (tokens whose ratio
    was cut), `importance` (weights of truncated importance sampling)."""


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
    *,
    rollout_logprobs: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
) -> LossResult:
    """Clipped policy-gradient loss with optional KL and entropy terms.

    Args:
        logprobs: [S] of the sampled tokens under the policy, packed response by response; differentiable.
        old_logprobs: [S] under the sampling policy; None takes `logprobs` themselves, without gradient.
        advantages: [G], one per response.
        ref_logprobs: [S] under the reference; None leaves the KL term out (then `kl_coef` must be 0).
        lengths: tokens per response, summing to S.
        settings: ratio, clip limits, KL and normaliser.
        rollout_logprobs: [S] as the rollout reported them; needed for `importance_cap`.
        mask: [S] bool, False for tokens that count neither in the loss nor in the normaliser; None keeps all.

    Raises ValueError where shapes disagree, or KL or importance sampling is asked for without what it needs.
    """
    if sum(lengths) != logprobs.shape[0] or len(lengths) != advantages.shape[0]:
        raise ValueError(
            f"lengths {tuple(lengths)} do not fit {logprobs.shape[0]} tokens, {len(advantages)} advantages"
        )
    if settings.kl_coef and ref_logprobs is None:
        raise ValueError("a KL coefficient needs reference log-probs")
    if settings.importance_cap is not None and rollout_logprobs is None:
        raise ValueError("importance sampling needs the rollout's log-probs")
    span = _Span(logprobs, lengths, mask)
    old = logprobs.detach() if old_logprobs is None else old_logprobs.to(logprobs)
    terms, ratio, clipped = _policy_terms(logprobs, old, span.spread(advantages), span, settings)
    importance = torch.ones_like(old)
    if settings.importance_cap is not None and rollout_logprobs is not None:
        importance = torch.exp(old.detach() - rollout_logprobs.to(old)).clamp(max=settings.importance_cap)
        terms = importance * terms
    kl = torch.zeros_like(logprobs)
    if ref_logprobs is not None:
        kl = kl_terms(logprobs, ref_logprobs.to(logprobs), settings.kl_estimator)
    share = span.share(settings.loss_normalizer)
    loss = policy_part = _sum(terms, share)
    kl_part = entropy_part = torch.zeros_like(policy_part)
    if settings.kl_coef:
        kl_part = _sum(settings.kl_coef * kl, share)
        loss = loss + kl_part
    if settings.entropy_coef:
        fixed = logprobs.detach()
        entropy_part = _sum(settings.entropy_coef * (fixed + fixed * (logprobs - fixed)), share)
        loss = loss + entropy_part
    return LossResult(
        loss=loss,
        weight=span.weight(settings),
        metrics={
            "tokens": torch.tensor(float(span.num_tokens)),
            "policy_loss": policy_part.detach(),
            "kl_loss": kl_part.detach(),
            "entropy_loss": entropy_part.detach(),
            "kl": _sum(kl.detach(), span.kept),
            "ratio": _sum(ratio.detach(), span.kept),
            "clipped": _sum(clipped.to(logprobs.dtype), span.kept),
            "importance": _sum(importance, span.kept),
        },
    )


class _Span:
    """Responses packed end to end, and which of their tokens count."""

    def __init__(self, logprobs: torch.Tensor, lengths: Sequence[int], mask: torch.Tensor | None) -> None:
        self._like = logprobs.detach()
        self._lengths = torch.tensor(list(lengths), device=logprobs.device)
        self.kept: torch.Tensor | None = None if mask is None else mask.to(logprobs)
        """[S] 1 or 0; None where every token counts."""
        self.counts = self._lengths if mask is None else self.sums(self._like.new_ones(len(logprobs))).long()
        """[G] tokens that count."""

    @property
    def num_tokens(self) -> int:
        """Tokens that count."""
        return int(self.counts.sum())

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """[G] to [S]."""
        return torch.repeat_interleave(values.to(self._like), self._lengths)

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """[S] to [G], over tokens that count."""
        kept = values if self.kept is None else values * self.kept
        index = torch.repeat_interleave(torch.arange(len(self._lengths), device=kept.device), self._lengths)
        return kept.new_zeros(len(self._lengths)).index_add(0, index, kept)

    def share(self, normalizer: Normalizer) -> torch.Tensor | None:
        """[S] factor of each token's term; None for 1 everywhere."""
        if normalizer != "responses":
            return self.kept
        share = self.spread(1 / self.counts.clamp(min=1).to(self._like))
        return share if self.kept is None else share * self.kept

    def weight(self, settings: LossSettings) -> int:
        """See `LossResult.weight`."""
        if settings.loss_normalizer == "tokens":
            return self.num_tokens
        responses = int((self.counts > 0).sum())
        return responses * settings.max_tokens if settings.loss_normalizer == "constant" else responses


def _policy_terms(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, span: _Span, settings: LossSettings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Per-token terms [S] of the policy loss, ratios [S], and which of them were cut [S]."""
    low, high = 1 - settings.clip_low, 1 + settings.clip_high
    difference = logprobs - old
    if settings.ratio == "sequence":
        difference = span.spread(span.sums(difference) / span.counts.clamp(min=1))
    ratio = torch.exp(difference)
    cut = ratio.clamp(low, high)
    if settings.ratio == "cispo":
        return -cut.detach() * advantages * logprobs, ratio, cut != ratio
    terms = -torch.minimum(ratio * advantages, cut * advantages)
    return terms, ratio, cut * advantages < ratio * advantages


def _sum(terms: torch.Tensor, share: torch.Tensor | None) -> torch.Tensor:
    return terms.sum() if share is None else (terms * share).sum()
