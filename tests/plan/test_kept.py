"""How many prompts keep their prefix activations is decided by the memory that is left."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest

from rollplex_cli.core.units import GIB
from rollplex_cli.plan.build import build_plan
from rollplex_cli.plan.kept import STEP_TOKENS, with_kept_prefixes
from rollplex_cli.profile.load import load_profile

if TYPE_CHECKING:
    from rollplex_cli.plan.build import Plan
    from rollplex_cli.profile.schema import Profile

ROOMY = 140 * GIB


def settled(profile: Profile, device_bytes: int | None) -> tuple[Profile, Plan]:
    plan = build_plan(profile, device_bytes)
    return with_kept_prefixes(profile, plan.memory_inputs), plan


def job(*sets: str) -> Profile:
    return load_profile("qwen25vl7b", ["memory.budget_gib=null", "schedule.prefix_activations=device", *sets])


def budgeted(profile: Profile, tokens: int) -> int:
    schedule = dataclasses.replace(profile.schedule, prefix_kept_tokens=tokens)
    return build_plan(dataclasses.replace(profile, schedule=schedule)).memory.budgeted_bytes


@pytest.mark.parametrize("mode", ["keep", "device"])
@pytest.mark.parametrize("budget", [80, 100, 130])
def test_the_most_that_fits(mode: str, budget: int) -> None:
    open_job = job(f"schedule.prefix_activations={mode}", f"memory.budget_gib={budget}")
    found, plan = settled(open_job, ROOMY)
    tokens = found.schedule.prefix_kept_tokens
    assert tokens is not None and tokens > 0 and tokens % STEP_TOKENS == 0
    assert plan.memory_inputs.kept_prefix_tokens == tokens
    assert plan.memory.budgeted_bytes <= budget * GIB < budgeted(open_job, tokens + STEP_TOKENS)


def test_a_device_without_a_budget_is_not_filled_to_the_brim() -> None:
    _, plan = settled(job(), ROOMY)
    assert plan.memory.budgeted_bytes <= 0.95 * ROOMY < plan.memory.budgeted_bytes + GIB


def test_stage_inputs_of_more_prompts_than_graphs() -> None:
    counts = [
        settled(job(f"schedule.prefix_activations={mode}"), ROOMY)[0].schedule.prefix_kept_tokens
        for mode in ("keep", "device")
    ]
    assert counts[0] is not None and counts[1] is not None and counts[1] > 5 * counts[0]


def test_nothing_is_decided_where_all_fit_or_the_memory_is_unknown_or_the_profile_says() -> None:
    few = job("algorithm.prompts_per_step=2")
    for profile, device in (
        (few, ROOMY),
        (job(), None),
        (job("schedule.prefix_kept_tokens=1000"), ROOMY),
        (job("schedule.prefix_activations=recompute"), ROOMY),
        (job("schedule.prefix_activations=host"), ROOMY),
    ):
        assert settled(profile, device)[0] == profile


def test_where_nothing_fits_none_is_kept() -> None:
    found, plan = settled(job("memory.budget_gib=30"), ROOMY)
    assert found.schedule.prefix_kept_tokens == 0
    assert plan.memory.budgeted_bytes > 30 * GIB
    # Then it takes what `recompute` takes.
    again = build_plan(job("schedule.prefix_activations=recompute", "memory.budget_gib=30"))
    assert plan.memory.budgeted_bytes == again.memory.budgeted_bytes


def test_half_of_the_ranks() -> None:
    profile = job(
        "schedule.name=disagg",
        "topology.train_tp=1",
        "schedule.prefix_activations=keep",
        "memory.budget_gib=125",
        "schedule.prefix_pack_tokens=0",
    )
    found, plan = settled(profile, ROOMY)
    tokens = found.schedule.prefix_kept_tokens
    assert tokens
    assert plan.memory.budgeted_bytes <= 125 * GIB < budgeted(profile, tokens + STEP_TOKENS)
