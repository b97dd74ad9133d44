"""The profile's `lora` section."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from rollplex_cli.profile.types import STRICT, NonNegativeFloat, PositiveFloat, PositiveInt

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LORA_TARGETS: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraProfile:
    """Train low-rank adapters beside frozen weights: x W^T + (alpha / rank) x A^T B^T, never merged. Gradients and
    optimizer state exist for the adapters alone, the vision tower is frozen, and the reference of `algorithm.kl_coef`
    is the base without them, which takes no memory."""

    rank: PositiveInt = 16
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """The update is scaled by alpha / rank."""
    targets: tuple[LoraTarget, ...] = LORA_TARGETS
    """Projections of every decoder layer that get an adapter."""
    dropout: NonNegativeFloat = 0.0
    """Only 0 can be trained: dropped inputs would make the trainer's policy another one than the rollout's."""
