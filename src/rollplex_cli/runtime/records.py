"""What a step leaves behind: one record per group, and the metrics row made of them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from rollplex_cli.engines.trainer.actor import SuffixOutcome

_FROM_RECORDS = (
    "loss_sum",
    "weight",
    "kl_sum",
    "clipped_sum",
    "importance_sum",
    "trained_tokens",
    "checked_tokens",
    "neg_logprob_sum",
    "diff_sum",
)
"""Figures that groups and ranks simply add up."""


@dataclass(slots=True, kw_only=True)
class GroupRecord:
    """Figures of one prompt group. Filled by its tasks; sums are over response tokens."""

    group: int
    sample_id: str
    rewards: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    """Reward parts by name, one value per response."""
    lengths: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    round: int = 0
    """Groups without a signal that held its place in the step before it."""
    idle: bool = False
    """Has no gradient: its advantages are all zero and the loss has no other term."""
    skipped: bool = False
    """Left out of the loss: nothing can be learned from it."""
    loss_sum: float = 0.0
    """Sum over response tokens; the normaliser is applied at the update. Of the last update that trained the group,
    as are the figures up to `trained_tokens`."""
    weight: int = 0
    """What the group added to the normaliser."""
    kl_sum: float = 0.0
    clipped_sum: float = 0.0
    importance_sum: float = 0.0
    trained_tokens: int = 0
    """Response tokens that counted in the loss."""
    checked_tokens: int = 0
    """Response tokens whose log-probs were compared."""
    neg_logprob_sum: float = 0.0
    """Sum of -log p(sampled token): a Monte-Carlo estimate of the entropy times the number of tokens."""
    diff_sum: float = 0.0
    """Sum of |rollout log-prob - trainer log-prob| of the same tokens."""
    diff_max: float = 0.0
    sampled_logprobs: list[float] = field(default_factory=list)
    """The rollout's log-probs of the response tokens, response by response."""
    stale: list[bool] = field(default_factory=list)
    """Which response tokens were drawn under older weights; empty where none was."""
    trainer_logprobs: list[float] = field(default_factory=list)
    """The trainer's, of the same tokens."""

    def take_logprobs(self, trained: torch.Tensor, sampled: torch.Tensor) -> None:
        """Compare log-probs [S] of trainer and rollout, both under the weights that sampled."""
        self.trainer_logprobs = trained.tolist()
        difference = (trained - sampled).abs()
        if self.stale:  # what older weights drew says nothing about these
            difference = difference[[not stale for stale in self.stale]]
        self.diff_sum, self.diff_max = float(difference.sum()), float(difference.max()) if len(difference) else 0.0
        self.checked_tokens = len(difference)

    def take_outcome(self, outcome: SuffixOutcome, *, kl_in_loss: bool) -> None:
        """Figures of a training pass."""
        metrics = outcome.metrics
        self.loss_sum, self.weight = float(outcome.loss), outcome.weight
        self.clipped_sum, self.importance_sum = metrics["clipped"], metrics["importance"]
        self.trained_tokens = int(metrics["tokens"])
        if kl_in_loss:
            self.kl_sum = metrics["kl"]

    @property
    def num_tokens(self) -> int:
        """Response tokens of the group."""
        return sum(self.lengths)

    @property
    def zero_variance(self) -> bool:
        """Whether all rewards are equal, so that the group teaches nothing. Compared with a tolerance: a mean of
        equal floats need not equal them."""
        return max(self.rewards) - min(self.rewards) <= 1e-9 if self.rewards else True


@dataclass(slots=True, kw_only=True)
class StepSums:
    """A rank's contribution to the metrics of a step; adds up over ranks."""

    num_groups: int = 0
    num_responses: int = 0
    num_tokens: int = 0
    reward_sum: float = 0.0
    reward_square_sum: float = 0.0
    num_nonzero_rewards: int = 0
    zero_variance: int = 0
    skipped: int = 0
    refilled: int = 0
    """Groups that took the place of another."""
    stale_tokens: int = 0
    weight: int = 0
    trained_tokens: int = 0
    checked_tokens: int = 0
    importance_sum: float = 0.0
    loss_sum: float = 0.0
    kl_sum: float = 0.0
    clipped_sum: float = 0.0
    neg_logprob_sum: float = 0.0
    diff_sum: float = 0.0
    diff_max: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    earned: dict[str, float] = field(default_factory=dict)
    """Responses that earned anything of a reward part, by its name."""
    worst_groups: list[tuple[float, str]] = field(default_factory=list)
    """Largest mean log-prob differences with their sample ids, worst first."""

    def add_group(self, record: GroupRecord) -> None:
        """Take in one group."""
        self.num_groups += 1
        self.num_responses += len(record.rewards)
        self.num_tokens += record.num_tokens
        self.reward_sum += sum(record.rewards)
        self.reward_square_sum += sum(r * r for r in record.rewards)
        self.num_nonzero_rewards += sum(r != 0.0 for r in record.rewards)
        self.zero_variance += record.zero_variance
        self.skipped += record.skipped or record.idle
        self.refilled += record.round > 0
        self.stale_tokens += sum(record.stale)
        for name in _FROM_RECORDS:
            setattr(self, name, getattr(self, name) + getattr(record, name))
        self.diff_max = max(self.diff_max, record.diff_max)
        for name, values in record.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + sum(values)
            self.earned[name] = self.earned.get(name, 0.0) + sum(v > 0 for v in values)
        mean = record.diff_sum / max(1, record.checked_tokens)
        self.worst_groups = sorted([*self.worst_groups, (mean, record.sample_id)], reverse=True)[:3]

    def add(self, other: StepSums) -> None:
        """Take in another rank."""
        for name in (
            "num_groups",
            "num_responses",
            "num_tokens",
            "reward_sum",
            "reward_square_sum",
            "num_nonzero_rewards",
            "zero_variance",
            "skipped",
            "refilled",
            "stale_tokens",
            *_FROM_RECORDS,
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.diff_max = max(self.diff_max, other.diff_max)
        for mine, theirs in ((self.parts, other.parts), (self.earned, other.earned)):
            for name, value in theirs.items():
                mine[name] = mine.get(name, 0.0) + value
        self.worst_groups = sorted([*self.worst_groups, *other.worst_groups], reverse=True)[:3]

    def to_json(self) -> dict[str, Any]:
        """As plain data for the agreement among ranks."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> StepSums:
        """Back from `to_json`."""
        row = {**row, "worst_groups": [(float(d), str(s)) for d, s in row["worst_groups"]]}
        return cls(**row)

    @property
    def diff_mean(self) -> float:
        """Mean absolute difference between rollout and trainer log-probs."""
        return self.diff_sum / max(1, self.checked_tokens)

    def metrics(self, *, normalizer: float, kl_in_reward: bool = False) -> dict[str, Any]:
        """The part of the metrics row that comes from groups."""
        responses, tokens = max(1, self.num_responses), max(1, self.num_tokens)
        trained = max(1, self.trained_tokens)
        mean = self.reward_sum / responses
        variance = max(0.0, self.reward_square_sum / responses - mean * mean)
        return {
            "reward_mean": mean,
            "reward_std": math.sqrt(variance),
            "loss": self.loss_sum / normalizer,
            "kl": self.kl_sum / (tokens if kl_in_reward else trained),
            "logprob_diff_mean": self.diff_mean,
            "logprob_diff_max": self.diff_max,
            "response_tokens_mean": self.num_tokens / responses,
            "entropy": self.neg_logprob_sum / tokens,
            "clip_fraction": self.clipped_sum / trained,
            "importance_mean": self.importance_sum / trained,
            "skipped_groups": self.skipped,
            "num_groups": self.num_groups,
            "refilled_groups": self.refilled,
            "kept_groups": self.num_groups - self.skipped,
            "stale_token_share": self.stale_tokens / tokens,
            "zero_variance_share": self.zero_variance / max(1, self.num_groups),
            "reward_parts_earned": {name: count / responses for name, count in sorted(self.earned.items())},
            "reward_parts": {name: value / responses for name, value in sorted(self.parts.items())},
        }
