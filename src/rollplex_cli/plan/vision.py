"""Where a step's vision features come from. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rollplex_cli.profile.schema import Profile

VisionSource = Literal["each", "trainer", "rollout"]
"""Every role runs its own tower; the trainer runs one for reference and actor; both take the rollout's output."""


def vision_source(profile: Profile) -> VisionSource:
    """Who runs the vision tower for a prompt, as `reuse.vision` and `reuse.frozen_vision` have it.

    `each` also where sharing would save nothing: an actor that adopts its boundary from the rollout runs a trained
    tower only in its backward, and without a reference a frozen one runs again only where prefixes are recomputed.
    """
    reuse, frozen = profile.reuse, profile.frozen_vision
    if reuse.vision and (frozen or not reuse.rollout_prefix):
        return "rollout"
    runs_again = profile.schedule.prefix_activations == "recompute" or profile.algorithm.kl_coef > 0
    return "trainer" if reuse.frozen_vision and frozen and runs_again else "each"
