"""The section `algorithm` of a profile."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from rollplex_cli.profile.types import STRICT, Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True, config=STRICT)
class AlgorithmProfile:
    """Advantages, loss and KL."""

    name: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "dapo", "gspo", "cispo", "ppo"] = "grpo"
    """Sets the defaults of the keys below (see `presets.py`); any of them may be set over it."""
    prompts_per_step: PositiveInt = 32
    """Prompt groups per step over all ranks; divisible by the data-parallel degree."""
    advantage: Literal["group_std", "group_mean", "leave_one_out", "batch_std"] = "group_std"
    """Baseline and scale of rewards: the group's mean and standard deviation, its mean alone, the mean of the other
    responses, or the group's mean with the standard deviation of the whole batch (which no early group can have)."""
    ratio: Literal["token", "sequence", "cispo"] = "token"
    """What is clipped: the ratio of each token (PPO), of each response (GSPO), or the weight of log p, which then
    keeps its gradient (CISPO)."""
    advantage_epsilon: PositiveFloat = 1e-4
    """Added to the standard deviation of a group's rewards."""
    clip_low: Fraction = 0.2
    clip_high: Annotated[float, Field(ge=0, le=10)] = 0.2
    loss_normalizer: Literal["tokens", "responses", "sequences", "constant"] = "tokens"
    """`tokens`: mean over all response tokens of the step; `responses`: mean of per-response means; `sequences`:
    mean of per-response sums; `constant`: that, divided by `rollout.max_new_tokens`."""
    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL term. 0 means that no reference model exists at all."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    """`reward` takes coefficient times the estimate, summed over the response, off each reward."""
    importance_cap: PositiveFloat | None = None
    """Truncated importance sampling: each token's loss times min(p_trainer / p_rollout, cap). `null` is off."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus, estimated from the sampled tokens."""
    num_minibatches: PositiveInt = 1
    """Updates per pass over a rollout; divides the prompt groups of a rank."""
    num_epochs: PositiveInt = 1
    """Passes over a rollout."""
    skip_zero_variance: bool = False
    """Leave groups whose rewards are all equal out of loss and normaliser (DAPO's filter)."""
    max_refills: NonNegativeInt = 0
    """With `skip_zero_variance`: start another prompt in place of each group whose rewards are all equal, so often at
    most, until the step has `prompts_per_step` groups to learn from (DAPO's dynamic sampling). `reward_mean` stays that
    of all groups sampled. 0 is off."""
    overlong_buffer_tokens: NonNegativeInt = 0
    """Length penalty over the last so many of `rollout.max_new_tokens` tokens, rising from 0 to
    `overlong_penalty` (DAPO's soft punishment); 0 is off."""
    overlong_penalty: NonNegativeFloat = 1.0
    mask_truncated: bool = False
    """Leave responses that were cut at `rollout.max_new_tokens` out of the loss."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Denominator of the ratio: the trainer's own log-probs under the same weights (ratio exactly 1 on the
    first minibatch), or the rollout's."""
