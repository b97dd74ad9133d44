from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.plan.build import build_plan
from rollplex_cli.plan.memory import ABLATIONS, PHASES, MemoryInputs, ablation_costs, activations, compute_memory
from rollplex_cli.plan.memory.objects import CLASSES
from rollplex_cli.plan.model import load_shape
from rollplex_cli.profile.load import load_profile

Make = Callable[..., MemoryInputs]


def moments_of(inputs: MemoryInputs) -> dict[str, dict[str, int]]:
    return {moment.name: moment.objects for moment in compute_memory(inputs).moments}


def test_every_phase_has_a_moment_and_objects_are_known(inputs: Make) -> None:
    for profile in ("tiny", "qwen25vl7b", "qwen25vl32b"):
        ledger = compute_memory(inputs(profile))
        assert {moment.phase for moment in ledger.moments} == set(PHASES)
        assert all(set(moment.objects) <= set(CLASSES) for moment in ledger.moments)
        assert all(size > 0 for moment in ledger.moments for size in moment.objects.values())


def test_early_groups_bring_training_beside_decode(inputs: Make) -> None:
    late, early = moments_of(inputs(early_groups=False)), moments_of(inputs(early_groups=True))
    assert set(early) - set(late) == {"decode, actor suffix", "decode, prefix backward"}
    beside = early["decode, actor suffix"]
    assert {"rollout_kv", "reference_weights", "gradients", "suffix_activations"} <= set(beside)
    assert "gradients" not in late["decode, prefixes"]
    assert early["actor suffix"] == late["actor suffix"]


def test_colocate_holds_one_boundary_and_no_prefix_beside_decode(inputs: Make) -> None:
    changed = inputs(overlap=False, early_groups=False, prefix_pack_tokens=0)
    found = moments_of(changed)
    assert set(found["decode"]) == {
        "snapshot", "rollout_kv", "vision_cache", "rollout_workspace", "context_and_graphs"
    }  # fmt: skip
    assert found["reference suffix"]["reference_boundary"] == found["actor suffix"]["actor_boundary"]
    assert "actor_boundary" not in found["reference suffix"]
    assert set(found["reference prefix"]) - {"context_and_graphs"} == {
        "snapshot", "reference_weights", "reference_boundary", "prefix_activations"
    }  # fmt: skip
    assert changed.held_groups == 1
    # Groups that follow each other may be of passes that are all under way.
    assert inputs(overlap=False, early_groups=False, prefix_pack_tokens=2048).held_groups == 8


def test_packs_under_way_hold_boundaries_and_their_gradients(inputs: Make) -> None:
    """Role by role: three passes of two prompts or more, and a prompt at its longest, of eight groups."""
    job = inputs(overlap=False, early_groups=False, prefix_pack_tokens=2048)
    plain = inputs(overlap=False, early_groups=False, prefix_pack_tokens=0)
    assert job.held_prompt_tokens == 3 * 2048 + 8192 and plain.held_prompt_tokens == 8192
    found, alone = moments_of(job)["actor suffix"], moments_of(plain)["actor suffix"]
    for name in ("actor_boundary", "boundary_gradients"):
        assert found[name] * 8192 == alone[name] * job.held_prompt_tokens
    # Beside decode every group counts at its longest.
    beside = [moments_of(inputs(overlap=True, prefix_pack_tokens=tokens)) for tokens in (0, 2048)]
    assert beside[0] == beside[1]


@pytest.mark.parametrize(("limit", "held"), [(0, 8), (1, 2), (6, 7), (7, 8), (20, 8)])
def test_boundaries_held_are_the_limit_and_the_next_group(inputs: Make, limit: int, held: int) -> None:
    assert inputs(prefixes_in_flight=limit).held_groups == held


def test_shared_vision_features_are_held_from_the_first_user_to_the_last(inputs: Make) -> None:
    """Qwen2.5-VL-32B: 8 groups x 8192 tokens x 5120 hidden values x 2 bytes; Qwen3-VL-4B: 3 more rows a token."""
    assert not any("vision_features" in objects for objects in moments_of(inputs(share_frozen_vision=True)).values())
    size = 8 * 8192 * 5120 * 2
    frozen = inputs(share_frozen_vision=True, freeze_vision=True)
    found = {name: objects.get("vision_features") for name, objects in moments_of(frozen).items()}
    assert {name for name, held in found.items() if held is None} == {"update", "publish"}
    assert set(found.values()) == {size, None}
    colocate = replace(frozen, overlap=False, early_groups=False)
    found = {name: objects.get("vision_features") for name, objects in moments_of(colocate).items()}
    assert found["decode"] is None and found["reference prefix"] == found["prefix backward"] == size
    alone = replace(colocate, has_reference=False, prefix_pack_tokens=0)
    assert moments_of(alone)["actor suffix"]["vision_features"] == size // 8  # group by group
    packed = replace(alone, prefix_pack_tokens=2048)
    assert moments_of(packed)["actor suffix"]["vision_features"] == size  # passes that are under way at once
    assert (
        "vision_features"
        not in moments_of(replace(frozen, has_reference=False, prefix_activations="keep"))["decode, prefixes"]
    )
    taken = replace(colocate, vision_of_rollout=True, freeze_vision=False)
    assert moments_of(taken)["decode"]["vision_features"] == size  # the prefill makes them
    other = inputs("qwen25vl7b", shape=load_shape("qwen3vl4b"), vision_of_rollout=True)
    rows = other.groups * other.max_prompt_tokens * (1 + other.shape.num_deepstack)
    assert other.shape.num_deepstack == 3
    assert moments_of(other)["decode, prefixes"]["vision_features"] == rows * other.shape.hidden_size * 2


def test_without_a_reference_nothing_of_it_is_anywhere(inputs: Make) -> None:
    changed = inputs(has_reference=False)
    assert not any(name.startswith("reference") for objects in moments_of(changed).values() for name in objects)
    assert [item.name for item in compute_memory(changed).host_objects] == ["optimizer_state", "prompt_cache"]


def test_a_frozen_vision_tower_needs_no_gradients_and_no_state(inputs: Make) -> None:
    plain, frozen = inputs("qwen25vl3b"), inputs("qwen25vl3b", freeze_vision=True)
    vision = sum(group.count for group in plain.shape.groups() if group.name.startswith("vision."))
    assert plain.trained_parameters - frozen.trained_parameters == vision
    assert moments_of(plain)["update"]["gradients"] - moments_of(frozen)["update"]["gradients"] == 4 * vision
    assert plain.state_bytes - frozen.state_bytes == 12 * vision
    assert (
        moments_of(frozen)["prefix backward"]["prefix_activations"]
        < moments_of(plain)["prefix backward"]["prefix_activations"]
    )
    assert moments_of(frozen)["publish"]["snapshot"] == moments_of(plain)["publish"]["snapshot"]


def test_a_split_master_moves_and_holds_ten_bytes(inputs: Make) -> None:
    full, split = inputs("qwen25vl7b"), inputs("qwen25vl7b", master="split")
    assert full.state_bytes == 12 * full.trained_parameters
    assert split.state_bytes == 10 * full.trained_parameters
    before, after = compute_memory(full), compute_memory(split)
    assert before.update_s is not None and after.update_s == pytest.approx(before.update_s * 10 / 12)
    # Three remainders less two bytes each, one whole master more.
    assert moments_of(split)["update"]["optimizer_chunks"] == 16_777_216 * (3 * 10 + 4 + 2 + 1)


def test_layer_inputs_on_the_host_leave_the_device_and_are_not_pinned(inputs: Make) -> None:
    recompute, host = inputs(), inputs(prefix_activations="host")
    assert (
        moments_of(host)["prefix backward"]["prefix_activations"]
        < moments_of(recompute)["prefix backward"]["prefix_activations"]
    )
    extra = next(i for i in compute_memory(host).host_objects if i.name == "prefix_activations")
    assert not extra.pinned
    # 8 groups x (tokens x 64 layers x 5120, patches x 33 stages x 1280) x 2 bytes
    assert extra.bytes == 8 * 2 * 8192 * (64 * 5120 + 4 * 33 * 1280)


def test_stage_inputs_on_the_device_up_to_a_limit(inputs: Make) -> None:
    recompute, device = inputs(), inputs(prefix_activations="device")
    for moment in ("decode, prefixes", "actor suffix"):
        extra = moments_of(device)[moment].get("prefix_activations", 0)
        extra -= moments_of(recompute)[moment].get("prefix_activations", 0)
        # As on the host: 8 groups x (tokens x 64 layers x 5120, patches x 33 stages x 1280) x 2 bytes
        assert extra == 8 * 2 * 8192 * (64 * 5120 + 4 * 33 * 1280)
    one = replace(device, prefix_kept_tokens=8192)
    held = moments_of(one)["actor suffix"]["prefix_activations"]
    assert held == 2 * 8192 * (64 * 5120 + 4 * 33 * 1280)
    # One of the others may run backward beside what is held.
    assert (
        moments_of(one)["prefix backward"]["prefix_activations"]
        == held + moments_of(recompute)["prefix backward"]["prefix_activations"]
    )
    assert not any(item.name == "prefix_activations" for item in compute_memory(device).host_objects)
    host = compute_memory(inputs(prefix_activations="host", prefix_kept_tokens=8192)).host_objects
    assert next(item.bytes for item in host if item.name == "prefix_activations") == held


def test_a_cpu_has_no_context_no_staging_and_no_link(inputs: Make) -> None:
    ledger = compute_memory(inputs("tiny"))
    names = {name for moment in ledger.moments for name in moment.objects}
    assert "context_and_graphs" not in names and "optimizer_chunks" not in names
    assert ledger.update_s is None and ledger.pinned_bytes == 0


@pytest.mark.parametrize(
    ("tokens", "shared", "separate"),
    [(8192 + 8 * 2048, 8, 2), (8192 + 8 * 2048 - 1, 7, 2), (10240, 1, 1), (2 * (8192 + 8 * 2048) + 10240, 17, 5)],
)
def test_capacity_in_sequences(inputs: Make, tokens: int, shared: int, separate: int) -> None:
    kv = compute_memory(inputs(kv_tokens=tokens)).kv
    assert (kv.tokens, kv.sequences, kv.separate_sequences) == (tokens, shared, separate)
    # A replica decodes 4 of 8 groups.
    assert kv.needed_tokens == 4 * (8192 + 8 * 2048)


def test_an_object_that_is_never_released_costs_itself_where_the_peak_is(inputs: Make) -> None:
    job = inputs()
    planned = compute_memory(job)
    costs = {cost.name: cost for cost in ablation_costs(job, ABLATIONS)}
    decode, peak = planned.moments[0].objects, planned.peak_moment().objects
    assert costs["no-kv-release"].extra_bytes == decode["rollout_kv"]
    assert costs["no-reference-release"].extra_bytes == decode["reference_weights"]
    assert costs["no-snapshot-release"].extra_bytes == decode["snapshot"] - peak["snapshot"]
    assert costs["no-optimizer-chunks"].extra_bytes == 12 * job.trained_parameters
    assert costs["naive"].ledger.peak_bytes == planned.naive_peak_bytes


def test_heads_that_several_ranks_train_are_never_unmapped(inputs: Make) -> None:
    # 4 key/value heads: at train TP 8 two ranks hold each of them.
    job = inputs("qwen25vl7b", train_tp=8, rollout_tp=4)
    kv = next(group for group in job.shape.groups() if group.name == "attention.kv")
    released = moments_of(job)["publish"]["snapshot"] - moments_of(job)["update"]["snapshot"]
    rows = sum(group.count for group in job.shape.groups() if group.split == "rows")
    assert kv.count and released < 2 * (rows // 4 - rows // 8)


def test_resident_objects_stay_for_the_whole_step(inputs: Make) -> None:
    managed, resident = compute_memory(inputs()), compute_memory(inputs(resident=True))
    for name in ("snapshot", "rollout_kv", "reference_weights", "gradients"):
        largest = max(moment.objects.get(name, 0) for moment in managed.moments)
        assert {moment.objects[name] for moment in resident.moments} == {largest}
    assert resident.peak_bytes > managed.peak_bytes
    assert resident.naive_peak_bytes == managed.naive_peak_bytes
    assert resident.moments[-2].objects["optimizer_chunks"] == managed.moments[-2].objects["optimizer_chunks"]


@pytest.mark.parametrize("degree", [1, 2])
def test_equal_degrees_share_everything(inputs: Make, degree: int) -> None:
    job = inputs("qwen25vl7b", train_tp=degree, rollout_tp=degree)
    (cost,) = ablation_costs(job, ("no-snapshot-release",))
    assert cost.extra_bytes == 0
    assert "publish_staging" not in moments_of(job)["publish"]


@settings(deadline=None, max_examples=40)
@given(
    kept=st.integers(0, 27), ahead=st.integers(1, 31), early=st.booleans(), tokens=st.integers(64, 8192),
    new=st.integers(64, 2048), chunk=st.integers(1, 1 << 18), left_out=st.sets(st.sampled_from(ABLATIONS)),
)  # fmt: skip
def test_less_of_anything_never_costs_more(
    inputs: Make, kept: int, ahead: int, early: bool, tokens: int, new: int, chunk: int, left_out: set[str]
) -> None:
    more = inputs("qwen25vl7b", early_groups=True, suffix_kept_layers=None, without=frozenset(left_out))
    less = inputs(
        "qwen25vl7b", early_groups=early, suffix_kept_layers=kept, prefixes_in_flight=ahead, max_prompt_tokens=tokens,
        max_new_tokens=new, chunk_elements=64 * chunk, without=frozenset(left_out),
    )  # fmt: skip
    assert compute_memory(less).peak_bytes <= compute_memory(more).peak_bytes
    for job in (less, more):
        ledger = compute_memory(job)
        assert ledger.peak_bytes <= ledger.naive_peak_bytes
        assert compute_memory(inputs("qwen25vl7b")).host_bytes >= 0


def test_layers_run_again_never_cost_more_than_layers_kept(inputs: Make) -> None:
    peaks = [compute_memory(inputs(suffix_kept_layers=kept)).peak_bytes for kept in range(65)]
    assert peaks == sorted(peaks)


def test_the_profile_s_keys_reach_the_plan() -> None:
    keys = [
        "optimizer.master=split",
        "memory.residency=resident",
        "schedule.suffix_kept_layers=3",
        "model.freeze_vision=true",
    ]
    job = build_plan(load_profile("qwen25vl7b", keys)).memory_inputs
    assert (job.master, job.resident, job.suffix_kept_layers, job.freeze_vision) == ("split", True, 3, True)


def test_groups_in_flight_beyond_the_share_count() -> None:
    plain = build_plan(load_profile("qwen25vl3b")).memory_inputs
    more = build_plan(load_profile("qwen25vl3b", ["rollout.extra_groups=4"])).memory_inputs
    assert more.groups == plain.groups + 4


@pytest.mark.parametrize(
    ("config", "kept", "backward", "forward"),
    [
        # Width 1280, MLP 1280 -> 5120 -> 1280 with quick GELU; bfloat16, 16 heads, two statistics of each norm.
        ("qwen2vl7b", 2 * (8 * 1280 + 3 * 5120) + 4 * (4 + 16), 2 * (1280 + 3 * 5120), 2 * (3 * 1280 + 3 * 5120)),
        # Width 1280, gated MLP of 3420, padded to 3424.
        ("qwen25vl7b", 2 * (8 * 1280 + 4 * 3424) + 4 * (2 + 16), 2 * (1280 + 3 * 3424), 2 * (3 * 1280 + 4 * 3424)),
        # Width 1152, MLP 1152 -> 4304 -> 1152 with GELU.
        ("qwen3vl8b", 2 * (8 * 1152 + 2 * 4304) + 4 * (4 + 16), 2 * (1152 + 2 * 4304), 2 * (3 * 1152 + 2 * 4304)),
    ],
)
def test_vision_blocks_by_family(inputs: Make, config: str, kept: int, backward: int, forward: int) -> None:
    job = inputs("qwen25vl7b", shape=load_shape(config), train_tp=1)
    block = activations.vision_block(job)
    assert (block.kept, block.backward, block.forward) == (kept, backward, forward)
