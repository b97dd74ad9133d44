"""Which work of a step is taken from another role, or left out."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from rollplex_cli.profile.types import STRICT


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ReuseProfile:
    """Work that need not be done."""

    rollout_prefix: bool = False
    """Take the actor's prefix keys and values from the rollout's own prefill instead of computing them again. Other
    kernels computed them, so log-probs and gradients differ by rounding. Needs
    `schedule.prefix_activations: recompute`."""
    vision: bool = False
    """Take the output of the vision tower from the rollout's prefill: a frozen tower then runs once per prompt for
    rollout, reference and actor, a trained one once for the rollout and the actor's forward (its backward runs it
    again, and needs `schedule.prefix_activations: recompute`). Other kernels computed it, so log-probs and gradients
    differ by rounding. Prefixes wait for their prompt's prefill, and the features of all prompts of a step are held
    (hidden size values a media token). Not with `schedule.name: disagg`."""
    frozen_vision: bool = True
    """Where the tower is frozen, the trainer's own runs once per prompt for reference, actor and the recomputation in
    the backward. Exact. Holds the features likewise; `reuse.vision` saves this run too."""
    skip_zero_advantage: bool = True
    """Train nothing on groups whose advantages are all zero, where no other term gives them a gradient. Exact: they
    count in the normaliser all the same, only not in the parity figures."""
