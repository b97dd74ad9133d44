from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.resources import shipped_profiles
from rollplex_cli.core.units import GIB
from rollplex_cli.plan.build import Plan, build_plan, memory_summary
from rollplex_cli.plan.fit import Machine, fit
from rollplex_cli.plan.memory import PHASES
from rollplex_cli.profile.load import load_profile


def plan_of(name: str, *overrides: str) -> Plan:
    return build_plan(load_profile(name, overrides))


@pytest.mark.parametrize("name", list(shipped_profiles()))
def test_every_shipped_profile_plans_within_its_budget(name: str) -> None:
    plan = plan_of(name)
    summary = memory_summary(plan)
    assert summary["fits"]
    assert summary["peak_bytes"] <= summary["naive_peak_bytes"]
    read = json.loads(plan.to_json())
    assert read["profile_name"] == name
    assert len(read["topology"]["places"]) == plan.topology.num_ranks


def test_names_that_others_rely_on() -> None:
    summary = memory_summary(plan_of("qwen25vl7b"))
    assert set(summary) >= {
        "peak_bytes", "naive_peak_bytes", "budget_bytes", "fits", "phases", "weights", "host_bytes", "pinned_bytes",
        "kv_tokens", "update_s", "moments", "host_objects", "kv_sequences", "assumptions",
    }  # fmt: skip
    assert set(summary["weights"]) == {"identical_bytes", "view_bytes", "rebuilt_bytes", "extra_bytes"}
    assert set(summary["phases"][0]) == {"name", "peak_bytes", "objects"}
    assert set(summary["phases"][0]["objects"][0]) == {"name", "class", "bytes"}


@pytest.mark.parametrize("name", list(shipped_profiles()))
def test_peak_is_the_largest_phase_and_phases_are_sums(name: str) -> None:
    plan = plan_of(name)
    for phase in memory_summary(plan)["phases"]:
        assert phase["peak_bytes"] == sum(item["bytes"] for item in phase["objects"])
    assert plan.memory.peak_bytes == max(plan.memory.phase_bytes(phase) for phase in PHASES)


@pytest.mark.parametrize(
    "override",
    ["algorithm.num_minibatches=2", "algorithm.num_epochs=2", "rollout.extra_groups=2", "algorithm.name=dapo"],
)
def test_nothing_is_planned_for_packs_where_prompts_run_alone(override: str) -> None:
    packed, alone = (
        plan_of("qwen25vl3b", "schedule.name=colocate", f"schedule.prefix_pack_tokens={tokens}", override)
        for tokens in (2048, 0)
    )
    assert packed.memory == alone.memory
    # A limit on boundaries stands against nothing then.
    load_profile("qwen25vl3b", [override, "schedule.prefixes_in_flight=2"])
    with pytest.raises(UsageError, match="expected 0 with `schedule.prefix_pack_tokens`"):
        load_profile("qwen25vl3b", ["schedule.prefixes_in_flight=2"])


def test_without_kl_there_is_no_reference() -> None:
    plan = plan_of("qwen25vl7b", "algorithm.kl_coef=0")
    assert not any(item.name.startswith("reference") for item in plan.memory.objects)
    assert plan.tasks.per_rank["ref_prefix"] == plan.tasks.per_rank["ref_suffix"] == 0
    assert plan.memory.host_bytes < plan_of("qwen25vl7b").memory.host_bytes


def test_a_tower_that_runs_once_is_a_task_of_its_own() -> None:
    def counts(name: str, *overrides: str) -> tuple[int, int]:
        tasks = plan_of(name, *overrides).tasks.per_rank
        return tasks["encode"], tasks["prefill"]

    groups = plan_of("lora").tasks.groups_per_training_group
    assert counts("qwen25vl7b") == (0, 0)
    assert counts("lora") == counts("lora", "reuse.rollout_prefix=true") == (groups, 0)
    assert counts("lora", "reuse.vision=true") == (groups, plan_of("lora").tasks.groups_per_replica)
    assert counts("lora", "reuse.frozen_vision=false") == (0, 0)
    trained = ("reuse.vision=true", "schedule.prefix_activations=recompute")
    assert counts("qwen25vl7b", *trained)[0] > 0
    # The actor's forward does not run the tower then, and its backward runs its own.
    assert counts("qwen25vl7b", *trained, "reuse.rollout_prefix=true") == (0, 0)


def test_adapters_leave_no_second_copy_and_little_to_update() -> None:
    """Rank 32 of the 7B shape, hand-worked: hidden 3584, KV width 512, MLP 18944, 28 layers."""
    plan = plan_of("lora")
    objects = {item.name: item.phases for item in plan.memory.objects}
    # q and o: both sides 3584; k and v: 3584 and 512; gate, up, down: 3584 and 18944
    trained = 28 * 32 * (2 * 2 * 3584 + 2 * (3584 + 512) + 3 * (3584 + 18944))
    assert trained == 80_740_352
    assert objects["gradients"]["UPDATE"] == 4 * trained
    assert {item.name: item.bytes for item in plan.memory.host_objects}["optimizer_state"] == 12 * trained
    assert not any(item.name == "reference_copy" for item in plan.memory.host_objects)
    assert "reference_weights" not in objects and "reference_boundary" in objects
    full = plan_of("lora", "lora=null")
    extra = {item.name: item.phases for item in full.memory.objects}["reference_weights"]["LEARN"]
    assert objects["snapshot"]["LEARN"] == extra + 2 * trained
    assert plan.memory.peak_bytes < full.memory.peak_bytes - extra


@settings(deadline=None)
@given(ahead=st.integers(1, 32), tokens=st.integers(64, 4096))
def test_holding_fewer_prefixes_or_shorter_prompts_never_costs_memory(ahead: int, tokens: int) -> None:
    # A limit that is left open would fill the room.
    profile = load_profile("qwen25vl7b", ["schedule.prefix_kept_tokens=4096"])
    smaller = dataclasses.replace(
        profile,
        schedule=dataclasses.replace(profile.schedule, prefixes_in_flight=ahead),
        data=dataclasses.replace(profile.data, max_prompt_tokens=tokens),
    )
    assert build_plan(smaller).memory.peak_bytes <= build_plan(profile).memory.peak_bytes


def test_task_counts_of_a_step() -> None:
    tasks = plan_of("qwen25vl32b").tasks
    assert tasks.responses_per_step == 256
    assert tasks.per_rank["actor_suffix"] == 8
    assert tasks.per_rank["decode"] == 4
    assert tasks.per_rank["update"] == tasks.per_rank["publish"] == 1
    assert tasks.max_response_tokens == 256 * 2048


def test_a_model_that_cannot_be_cut_lists_every_reason() -> None:
    with pytest.raises(
        UsageError, match=r"cannot be split this way:\n  qwen25vl7b has 28 attention heads, `topology.tr"
    ):
        plan_of("qwen25vl7b", "topology.ranks_per_node=8", "topology.train_tp=8")


GPUS = Machine(gpu_bytes=(80 * GIB,) * 2, host_bytes=1024 * GIB)


def test_fit_on_the_machine_it_is_for() -> None:
    assert fit(plan_of("qwen25vl7b"), GPUS).fits
    assert fit(plan_of("tiny"), Machine(host_bytes=8 * GIB)).fits
    assert fit(plan_of("tiny"), Machine()).fits


def test_verdict_names_everything_that_is_missing() -> None:
    verdict = fit(plan_of("qwen25vl32b"), Machine(host_bytes=16 * GIB))
    assert [reason.partition(":")[0] for reason in verdict.reasons] == [
        "nodes",
        "GPUs per node",
        "host memory per node",
    ]
    assert "GPUs: 32, 8 per node" in verdict.needs
    assert any(line.startswith("memory per GPU: ") for line in verdict.needs)


def test_small_gpus_and_small_budgets_do_not_fit() -> None:
    small = dataclasses.replace(GPUS, gpu_bytes=(80 * GIB, 24 * GIB))
    assert fit(plan_of("qwen25vl7b"), small).reasons[0].endswith("24.0 GiB available")
    tight = plan_of("qwen25vl7b", "memory.budget_gib=20")
    assert fit(tight, GPUS).reasons[0].endswith("20.0 GiB available")
    assert not memory_summary(tight)["fits"]
    host = plan_of("qwen25vl7b", "memory.host_budget_gib=1")
    assert fit(host, GPUS).reasons[0].startswith("host memory per node")


def test_a_peak_is_named_with_its_phase_moment_and_largest_objects() -> None:
    (reason,) = fit(plan_of("qwen25vl7b", "memory.budget_gib=20"), GPUS).reasons
    assert reason.startswith("memory per GPU: 71.4 GiB needed at the peak (LEARN, actor suffix: suffix_activations ")
    assert ", gradients 15.4 GiB, snapshot 10.6 GiB, ...)" in reason


def test_a_chunk_larger_than_the_budget_is_named() -> None:
    plan = plan_of("qwen25vl7b", "memory.budget_gib=20", f"optimizer.chunk_elements={1 << 32}")
    reasons = fit(plan, GPUS).reasons
    assert reasons[1] == (
        "`optimizer.chunk_elements`: 3 chunks of 4294967296 parameters in flight take 150.6 GiB by themselves"
    )


def test_a_budget_counts_on_a_cpu_too() -> None:
    # Weights of 2.8 MiB twice, their gradients, and 8 MiB of keys and values lie in regions.
    (reason,) = fit(plan_of("tiny", "memory.budget_gib=0.015"), Machine()).reasons
    assert reason.startswith(
        "regions per rank: 16.4 MiB needed at the peak (GENERATE, decode, actor suffix: rollout_kv "
    )
    assert fit(plan_of("tiny", "memory.budget_gib=0.0165"), Machine()).fits


def test_ranks_with_one_role_hold_the_objects_of_that_role() -> None:
    both = plan_of("qwen25vl7b", "topology.ranks_per_node=4")
    halves = ("topology.ranks_per_node=4", "schedule.name=disagg")
    apart = plan_of("qwen25vl7b", *halves)
    names = {item.name for item in apart.memory.objects}
    assert {"gradients", "reference_weights"} <= names and not {"rollout_kv", "vision_cache"} & names
    decoding = plan_of("qwen25vl7b", *halves, "rollout.kv_tokens=4000000")
    objects = {item.name: item.phases for item in decoding.memory.objects}
    assert set(objects) == {"snapshot", "rollout_kv", "vision_cache", "rollout_workspace", "context_and_graphs"}
    assert objects["snapshot"]["GENERATE"] == objects["snapshot"]["UPDATE"]  # nothing of it is foreign here
    # Two ranks of four train, with all groups of the step between them instead of half.
    assert apart.topology.data_parallel == 1 and both.topology.data_parallel == 2
    assert apart.node_host_bytes == 2 * apart.memory.host_bytes == 2 * decoding.memory.host_bytes


def test_replicas_on_several_nodes_need_an_order_only_beside_training() -> None:
    """Where the ranks of a replica launch in one order they share memory."""
    split = ("topology.num_nodes=8", "topology.ranks_per_node=4")
    with pytest.raises(UsageError, match="needs each rollout replica on one node: ranks 0, 2, 4, 6 are on nodes 0, 1"):
        plan_of("qwen25vl32b", *split)
    for without in ("schedule.name=colocate", "topology.rollout_tp=1", "topology.device=cpu"):
        plan_of("qwen25vl32b", *split, without)
    with pytest.raises(UsageError, match="on one node"):
        plan_of("qwen25vl32b", *split, "topology.device=cpu", "schedule.launch_order=always")


def test_no_gpus_train_beside_a_rollout_of_several_without_an_order() -> None:
    with pytest.raises(UsageError, match="`schedule.launch_order: never` forbids: `topology.rollout_tp` is 4"):
        plan_of("qwen25vl32b", "schedule.launch_order=never")
    plan_of("qwen25vl32b", "schedule.launch_order=never", "schedule.name=colocate")
