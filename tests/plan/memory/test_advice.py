from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.core.units import GIB
from rollplex_cli.plan.build import build_plan
from rollplex_cli.plan.fit import Machine, advice_for, advice_text, memory_reasons
from rollplex_cli.plan.memory import MemoryInputs
from rollplex_cli.plan.memory.advice import KV_STEP, SETTINGS, Advice, Limits, advise
from rollplex_cli.profile.load import load_profile

Make = Callable[..., MemoryInputs]


def settings_of(advice: Advice | None) -> list[str]:
    assert advice is not None
    return advice.to_dict()["set"]


def limits(device_gib: float | None = None, host_gib: float | None = None) -> Limits:
    def size(gib: float | None) -> int | None:
        return None if gib is None else round(gib * GIB)

    return Limits(device_bytes=size(device_gib), host_bytes=size(host_gib))


def test_nothing_is_advised_where_nothing_is_missing(inputs: Make) -> None:
    assert advise(inputs(), limits(74, 64)) is None
    assert advise(inputs(), limits()) is None


def test_the_mildest_value_of_one_key(inputs: Make) -> None:
    job = inputs(suffix_kept_layers=None)
    found = settings_of(advise(job, limits(74)))
    assert len(found) == 1
    key, _, value = found[0].partition("=")
    assert key == "schedule.suffix_kept_layers"
    assert not limits(74).excess(replace(job, suffix_kept_layers=int(value)))
    assert limits(74).excess(replace(job, suffix_kept_layers=int(value) + 1))


def test_what_is_held_where_the_peak_is_decides_the_key(inputs: Make) -> None:
    # Decode is the largest moment: a smaller pool is the only single setting that helps.
    pool = inputs(kv_tokens=1 << 20, suffix_kept_layers=0)
    (change,) = settings_of(advise(pool, limits(74)))
    assert change.startswith("rollout.kv_tokens=")
    assert int(change.partition("=")[2]) % KV_STEP == 0
    # A chunk as large as the shard.
    chunk = inputs(chunk_elements=1 << 32, suffix_kept_layers=0)
    assert settings_of(advise(chunk, limits(60)))[0].startswith("optimizer.chunk_elements=")
    # Kept prefixes.
    kept = inputs(prefix_activations="keep", suffix_kept_layers=0)
    assert settings_of(advise(kept, limits(74))) == ["schedule.prefix_activations=recompute"]
    # Masters on the host.
    state = inputs("qwen25vl7b")
    assert settings_of(advise(state, limits(host_gib=50))) == ["optimizer.master=split"]


def test_settings_are_combined_before_the_job_is_touched(inputs: Make) -> None:
    job = inputs("qwen25vl7b", early_groups=True, suffix_kept_layers=None, prefixes_in_flight=0)
    advice = advise(job, limits(48))
    assert advice is not None and advice.fits and not advice.changes_job
    assert len(advice.changes) > 1
    for left_out in advice.changes:
        without = job
        for change in advice.changes:
            without = without if change is left_out else replace(without, **change.fields)
        assert limits(48).excess(without), f"{left_out.key} is not needed"


def test_fewer_boundaries_need_prompts_one_by_one(inputs: Make) -> None:
    """Packs alone cost no memory beside decode, but stand against a limit on boundaries."""
    advice = advise(inputs("qwen25vl7b", prefix_pack_tokens=2048), limits(42))
    plain = advise(inputs("qwen25vl7b", prefix_pack_tokens=0), limits(42))
    assert advice is not None and plain is not None and advice.fits and not advice.changes_job
    assert advice.peak_bytes == plain.peak_bytes
    assert set(settings_of(advice)) - set(settings_of(plain)) == {"schedule.prefix_pack_tokens=0"}
    assert "--set schedule.prefix_pack_tokens=0 --set schedule.prefixes_in_flight=" in advice_text(advice)


def test_a_job_that_cannot_be_helped_says_so(inputs: Make) -> None:
    advice = advise(inputs("qwen25vl7b"), limits(8))
    assert advice is not None and not advice.fits and advice.changes_job
    assert advice_text(advice).startswith("no change of the profile is enough: the furthest would still take ")


@settings(deadline=None, max_examples=20)
@given(device=st.integers(20, 140), host=st.integers(20, 80), early=st.booleans(), kv=st.integers(20, 512))
def test_what_is_advised_fits_when_it_is_set(device: int, host: int, early: bool, kv: int) -> None:
    start = [
        f"memory.budget_gib={device}", f"memory.host_budget_gib={2 * host}", f"schedule.early_groups={early}".lower(),
        f"rollout.kv_tokens={1024 * kv}", "schedule.suffix_kept_layers=28",
    ]  # fmt: skip
    plan = build_plan(load_profile("qwen25vl7b", start))
    advice = advice_for(plan, Machine())
    assert (advice is None) == (not memory_reasons(plan, Machine()))
    wanted = [] if advice is None else settings_of(advice)
    if advice is None or not advice.fits:
        return
    changed = build_plan(load_profile("qwen25vl7b", [*start, *wanted]))
    assert not memory_reasons(changed, Machine()), wanted
    # What room the advice leaves, the plan may fill with prefix activations.
    kept = json.dumps(plan.memory_inputs.prefix_kept_tokens)
    as_advised = build_plan(load_profile("qwen25vl7b", [*start, *wanted, f"schedule.prefix_kept_tokens={kept}"]))
    assert as_advised.memory.peak_bytes == advice.peak_bytes


@pytest.mark.parametrize("knob", SETTINGS, ids=lambda knob: knob.__name__.strip("_"))
def test_every_setting_goes_from_mild_to_far(inputs: Make, knob: Callable[[MemoryInputs], list[object]]) -> None:
    job = inputs("qwen25vl7b", early_groups=True, suffix_kept_layers=None, prefix_activations="keep", data_parallel=1)
    tight = limits(1, 1)
    excess = [tight.excess(replace(job, **change.fields)) for change in knob(job)]  # type: ignore[attr-defined]
    assert excess == sorted(excess, reverse=True)
