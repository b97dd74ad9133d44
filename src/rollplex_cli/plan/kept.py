"""How many prompts keep their prefix activations: as many as fit beside everything else."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollplex_cli.plan.memory import MemoryInputs, MemoryLedger
    from rollplex_cli.profile.schema import Profile

    Planned = tuple[MemoryInputs, MemoryLedger]

STEP_TOKENS = 256


def settle_kept_prefixes(
    inputs: MemoryInputs, limit_bytes: int | None, plan: Callable[[MemoryInputs], Planned]
) -> Planned:
    """What `plan` makes of `inputs`, with `prefix_kept_tokens` decided where it is open and not all prompts fit: the
    largest multiple of STEP_TOKENS that does, 0 where nothing is left. Without a limit all prompts fit."""
    found, memory = plan(inputs)
    on_device = inputs.prefix_activations in ("keep", "device") and inputs.prefix_kept_tokens is None
    if not on_device or limit_bytes is None or memory.budgeted_bytes <= limit_bytes:
        return found, memory
    # Peaks only rise with it: the first count that does not fit is searched for by halving.
    fits, too_many = 0, -(-inputs.kept_prefix_tokens // STEP_TOKENS)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        _, memory = plan(dataclasses.replace(inputs, prefix_kept_tokens=middle * STEP_TOKENS))
        fits, too_many = (middle, too_many) if memory.budgeted_bytes <= limit_bytes else (fits, middle)
    return plan(dataclasses.replace(inputs, prefix_kept_tokens=fits * STEP_TOKENS))


def with_kept_prefixes(profile: Profile, inputs: MemoryInputs) -> Profile:
    """The profile as it was planned."""
    schedule = dataclasses.replace(profile.schedule, prefix_kept_tokens=inputs.prefix_kept_tokens)
    return dataclasses.replace(profile, schedule=schedule)
