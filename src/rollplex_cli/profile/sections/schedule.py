"""The profile's `schedule` section."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from rollplex_cli.profile.types import STRICT, NonNegativeFloat, NonNegativeInt


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ScheduleProfile:
    """The order of tasks within a step. None of these settings changes a result, but for `prefix_pack_tokens`."""

    name: Literal["rollplex", "colocate", "disagg"] = "rollplex"
    """`rollplex`: what depends on the prompt alone runs beside decode. `colocate`: decode, then reference, then actor.
    `disagg`: that too, with half of the ranks to decode and half to train; weights are sent after every update."""
    prefixes_in_flight: NonNegativeInt = 0
    """Prompt groups whose actor boundary may be held ahead of their suffix; 0 means all of the step."""
    early_groups: bool = True
    """Train groups whose responses are final while others still decode."""
    prefix_activations: Literal["keep", "device", "host", "recompute"] = "recompute"
    """What prefix backward uses: kept activations; inputs of all layers, kept on the device or saved on the host (one
    forward more than `keep`); or nothing, which takes two."""
    prefix_kept_tokens: NonNegativeInt | None = None
    """Tokens of the prompts for which that is held at a time; prompts beyond it are computed again in their backward.
    `null`: under `keep` and `device` as many as the memory plan allows, else all."""
    prefix_pack_tokens: NonNegativeInt = 0
    """Prompts of several groups run their prefix in one pass of up to so many tokens; 0 is one prompt a pass. On a GPU
    a short prompt's prefix waits for the host, which launches as much for one prompt as for many: about 2048 is where
    a pass no longer does. It changes results in rounding. Prompts run alone where a step has several updates, groups
    that are not known at its start, or vision features of the rollout."""
    suffix_kept_layers: NonNegativeInt | None = None
    """Decoder layers, counted from the last, whose activations of the responses are kept for the backward; the
    others run their forward again. `null` keeps all, which is fastest; 0 needs the least memory."""
    policy: str = "auto"
    """How decode and the trainer share a GPU: `serial` (never at once), `streams` (equal priority), `priority`
    (decode first), `fence:R` (R SMs kept from the trainer), `partition:D/P` (percent of the SMs for each), or `auto`,
    which measures at the start and never overlaps what would not pay. Without a GPU only `serial` differs."""
    calibration_s: NonNegativeFloat = 1.0
    """Seconds of each of the measurements of `auto`; 0 takes a fence of 32 SMs unmeasured."""
    launch_order: Literal["auto", "always", "never"] = "auto"
    """One order on all ranks of a rollout replica of what decode and the trainer beside it launch, without which their
    collectives can wait for each other for ever on GPUs. `auto`: on GPUs. Nothing is ordered where
    `topology.rollout_tp` is 1 or nothing overlaps."""
