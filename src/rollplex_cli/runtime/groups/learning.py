"""What is learned from the groups of a rollout: which update trains which group, on which numbers, with which loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollplex_cli.rl.losses import LossResult, LossSettings, policy_loss

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex_cli.engines.trainer.actor import Actor, SuffixOutcome
    from rollplex_cli.engines.trainer.prefix import PrefixState
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.rl.packing import PackedSuffix
    from rollplex_cli.runtime.records import GroupRecord


@dataclass(slots=True, kw_only=True)
class GroupBatch:
    """Everything of a group that its loss reads. Small: kept on the host through all updates of a step."""

    packed: PackedSuffix
    advantages: torch.Tensor
    """[G] float32."""
    reference: torch.Tensor | None
    """[S], where KL is in the loss."""
    sampled: torch.Tensor
    """[S] float32, the rollout's log-probs."""
    mask: torch.Tensor | None
    """[S] bool, False for tokens that are not learned from; None keeps all."""
    stale: torch.Tensor | None = None
    """[S] bool, True for tokens drawn under older weights; None where none was."""
    old: torch.Tensor | None = None
    """[S] log-probs under the weights that sampled; None until they are known."""

    @classmethod
    def of(
        cls,
        record: GroupRecord,
        packed: PackedSuffix,
        advantages: torch.Tensor,
        reference: torch.Tensor | None,
        *,
        mask_truncated: bool,
    ) -> GroupBatch:
        """From what the step has recorded of the group; with `mask_truncated` cut responses are not learned from."""
        mask = None
        if mask_truncated and "length" in record.finish:
            kept = torch.tensor([finish != "length" for finish in record.finish])
            mask = torch.repeat_interleave(kept, torch.tensor(record.lengths))
        sampled = torch.tensor(record.sampled_logprobs, dtype=torch.float32)
        stale = torch.tensor(record.stale) if record.stale else None
        return cls(packed=packed, advantages=advantages, reference=reference, sampled=sampled, mask=mask, stale=stale)


class Learner:
    """The updates of one step on one rank.

    A pass over the rollout has `num_minibatches` updates, each from an equal share of the rank's groups by id; there
    are `num_epochs` passes. The first update computes the log-probs of every group, under the weights that sampled;
    it trains its own groups and only scores the others. Later updates recompute the boundaries of their groups.

    Args:
        groups: local group ids of the step.
    """

    def __init__(self, profile: Profile, groups: Sequence[int]) -> None:
        algorithm = profile.algorithm
        self._settings = LossSettings.from_profile(algorithm, profile.rollout.max_new_tokens)
        self._old_from_rollout = algorithm.old_logprobs == "rollout"
        self._mask_stale = profile.rollout.stale_tokens == "mask"
        self._places = {group: place for place, group in enumerate(sorted(groups))}
        self._num_places, self._num_minibatches = max(1, len(self._places)), algorithm.num_minibatches
        self.num_updates = algorithm.num_minibatches * algorithm.num_epochs
        other_terms = algorithm.kl_coef and algorithm.kl_in == "loss", algorithm.entropy_coef
        self._may_leave_out = profile.reuse.skip_zero_advantage and self.num_updates == 1 and not any(other_terms)
        self.update = 0
        """Number of the current update, 0-based."""
        self.weight = 0
        """What the groups trained in the current update add to its normaliser."""
        self.batches: dict[int, GroupBatch] = {}
        """By group; kept only where there are several updates."""
        self._trained: set[int] = set()

    def begin(self, update: int) -> list[int]:
        """Go to an update after the first; returns the groups it trains, by id. Skipped groups are not among them."""
        self.update, self.weight, self._trained = update, 0, set()
        return [group for group in sorted(self._places) if group in self.batches and self.trains(group)]

    def replace(self, group: int, by: int) -> None:
        """A group that carries no signal gives its place among the updates to another."""
        self._places[by] = self._places[group]

    def trains(self, group: int) -> bool:
        """Whether the current update trains a group."""
        share = self._places[group] * self._num_minibatches // self._num_places
        return share == self.update % self._num_minibatches

    def suffix(
        self, actor: Actor, group: int, state: PrefixState, batch: GroupBatch
    ) -> tuple[torch.Tensor, SuffixOutcome | None]:
        """Train a group, or score it where its turn comes later; returns its log-probs [S] on the host."""
        if self.trains(group):
            outcome = actor.suffix(state, batch.packed, lambda logprobs: self._loss(logprobs, batch))
            self.weight += outcome.weight
            self._trained.add(group)
            logprobs = outcome.logprobs
        else:
            outcome, logprobs = None, actor.logprobs(state, batch.packed)
        logprobs = logprobs.float().cpu()
        if batch.old is None:
            batch.old = batch.sampled if self._old_from_rollout else logprobs
        if self.num_updates > 1:
            self.batches[group] = batch
        return logprobs, outcome

    @property
    def may_leave_out(self) -> bool:
        """Whether a group of zero advantages has no gradient and nothing later needs its log-probs."""
        return self._may_leave_out

    def leave_out(self, batch: GroupBatch) -> int:
        """Count a group without a gradient in the update's normaliser, as training it would; returns its weight."""
        zeros = torch.zeros(batch.packed.num_tokens)
        weight = self._loss(zeros, batch).weight
        self.weight += weight
        return weight

    def prefix_backward(self, actor: Actor, group: int, state: PrefixState) -> None:
        """Send a trained group's gradients on; drop the boundary of one that was scored or skipped."""
        if group in self._trained:
            actor.prefix_backward(state)
        else:
            actor.release(state)

    def _loss(self, logprobs: torch.Tensor, batch: GroupBatch) -> LossResult:
        # In the first update the policy is the one that sampled: its own log-probs, not a copy rounded elsewhere.
        old = batch.old if batch.old is not None or not self._old_from_rollout else batch.sampled
        mask = batch.mask
        if batch.stale is not None and self._mask_stale:
            mask = ~batch.stale if mask is None else mask & ~batch.stale
        elif batch.stale is not None:
            fresh = logprobs.detach() if old is None else old.to(logprobs)
            old = torch.where(batch.stale.to(logprobs.device), batch.sampled.to(logprobs), fresh)
        return policy_loss(
            logprobs, old, batch.advantages, batch.reference, batch.packed.lengths, self._settings,
            rollout_logprobs=batch.sampled, mask=mask,
        )  # fmt: skip
