"""Profile to Plan: everything that can be known before a process starts."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.units import GIB
from rollplex_cli.plan.kept import settle_kept_prefixes
from rollplex_cli.plan.memory import PHASES, MemoryInputs, MemoryLedger, compute_memory
from rollplex_cli.plan.memory.assumptions import assumptions
from rollplex_cli.plan.memory.objects import CLASSES, Moment
from rollplex_cli.plan.model import ModelShape, load_shape
from rollplex_cli.plan.tasks import TaskCounts, count_tasks
from rollplex_cli.plan.topology import Topology, build_topology, head_faults, require_replicas_on_one_node
from rollplex_cli.plan.vision import vision_source

if TYPE_CHECKING:
    from rollplex_cli.profile.schema import Profile

VALUE_BYTES = {"float32": 4, "bfloat16": 2}
KEPT_SHARE = 0.95
"""Of a device without a budget, what prefix activations may fill up to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a job will do and need."""

    profile_name: str
    device: str
    """`auto`, `cpu` or `cuda`, as the profile asks."""
    max_steps: int
    model: ModelShape
    topology: Topology
    tasks: TaskCounts
    memory_inputs: MemoryInputs
    memory: MemoryLedger
    budget_bytes: int | None
    """Device memory a rank may use; None takes what the device has."""
    host_budget_bytes: int | None
    """Host memory a node's ranks may use together; None takes what the node has."""

    @property
    def node_host_bytes(self) -> int:
        """Host memory that the ranks of one node need together for the planned objects."""
        topology = self.topology
        training = min(topology.ranks_per_node, topology.num_training_ranks)
        device = topology.ranks_per_node * self.memory.peak_bytes if self.device == "cpu" else 0
        return training * self.memory.host_bytes + device

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values = dataclasses.asdict(self)
        values["model"]["num_parameters"] = self.model.num_parameters
        values["memory"] = memory_summary(self)
        inputs = values["memory_inputs"]
        del inputs["shape"]
        inputs["without"] = sorted(inputs["without"])
        return values

    def to_json(self) -> str:
        """The text of `plan.json`."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


def build_plan(profile: Profile, device_bytes: int | None = None) -> Plan:
    """Plan a job. Pure but for reading the model's `config.json`.

    Args:
        profile: its `schedule.prefix_kept_tokens` may be open; `memory_inputs` has what the plan takes.
        device_bytes: memory of a rank's device, where it is known and may be less than the budget.

    Raises:
        UsageError: no such model configuration, or a model that the topology cannot cut.
    """
    shape = load_shape(profile.model.config)
    place = profile.topology
    faults = head_faults(shape, place.train_tp, place.rollout_tp)
    if faults:
        raise UsageError("the model cannot be split this way:" + "".join(f"\n  {fault}" for fault in faults))
    topology = build_topology(
        place.num_nodes, place.ranks_per_node, place.train_tp, place.rollout_tp, disaggregated=profile.disaggregated
    )
    _check_launches(profile, topology)
    tasks = count_tasks(
        prompts_per_step=profile.algorithm.prompts_per_step,
        group_size=profile.rollout.group_size,
        data_parallel=topology.data_parallel,
        replicas_per_group=topology.replicas_per_group,
        max_prompt_tokens=profile.data.max_prompt_tokens,
        max_new_tokens=profile.rollout.max_new_tokens,
        has_reference=profile.algorithm.kl_coef > 0,
        vision=vision_source(profile),
    )
    inputs = _memory_inputs(profile, shape, topology, tasks)
    budget = _gib(profile.memory.budget_gib)
    # Kept by choice, so it leaves room for what the allocator cannot use; a budget has been chosen with that in mind.
    room = None if device_bytes is None else int(device_bytes * KEPT_SHARE)
    limit = min((size for size in (budget, room) if size is not None), default=None)
    compute = _of_largest_role if topology.disaggregated else _of_both_roles
    inputs, memory = settle_kept_prefixes(inputs, limit, compute)
    return Plan(
        profile_name=profile.name,
        device=place.device,
        max_steps=profile.runtime.max_steps,
        model=shape,
        topology=topology,
        tasks=tasks,
        memory_inputs=inputs,
        memory=memory,
        budget_bytes=budget,
        host_budget_bytes=_gib(profile.memory.host_budget_gib),
    )


def _check_launches(profile: Profile, topology: Topology) -> None:
    """Decode and training at once on the same ranks, both with collectives: only in one launch order.

    Raises:
        UsageError: on GPUs without it, or ranks that cannot share it.
    """
    device = profile.topology.device
    if profile.orders_launches(device):
        require_replicas_on_one_node(topology)
    elif profile.rollout_beside_training and device == "cuda":
        raise UsageError(
            "training beside a rollout of several GPUs needs one launch order of their collectives, which "
            f"`schedule.launch_order: never` forbids: `topology.rollout_tp` is {topology.rollout_tp}",
            hint="leave `schedule.launch_order` at `auto`, or set `topology.rollout_tp` to 1 or `schedule.name` to "
            "`colocate`",
        )


def _of_both_roles(inputs: MemoryInputs) -> tuple[MemoryInputs, MemoryLedger]:
    return inputs, compute_memory(inputs)


def _of_largest_role(inputs: MemoryInputs) -> tuple[MemoryInputs, MemoryLedger]:
    """Where a rank either trains or decodes: the role that needs most device memory, with the host memory of one that
    trains. One holds its training shard alone, the other its rollout shard through the whole step."""
    training = dataclasses.replace(inputs, role="training", rollout_tp=inputs.train_tp)
    rollout = dataclasses.replace(
        inputs, role="rollout", train_tp=inputs.rollout_tp, groups=inputs.groups_per_replica, has_reference=False
    )
    trains, decodes = compute_memory(training), compute_memory(rollout)
    if trains.peak_bytes >= decodes.peak_bytes:
        return training, trains
    return rollout, dataclasses.replace(decodes, host_objects=trains.host_objects, update_s=trains.update_s)


def memory_summary(plan: Plan) -> dict[str, Any]:
    """The memory plan under the names that `profile-memory --json` promises.

    The objects of a phase are those of its largest moment, so they add up to its peak.
    """
    memory, budget = plan.memory, plan.budget_bytes
    return {
        "peak_bytes": memory.peak_bytes,
        "naive_peak_bytes": memory.naive_peak_bytes,
        "budget_bytes": budget,
        "budgeted_bytes": memory.budgeted_bytes,
        "fits": budget is None or memory.budgeted_bytes <= budget,
        "phases": [
            {"name": phase, "peak_bytes": moment.total_bytes, "objects": _objects(moment)}
            for phase in PHASES
            for moment in (memory.peak_moment(phase),)
        ],
        "moments": moments_summary(memory),
        "weights": dataclasses.asdict(memory.weights),
        "host_bytes": memory.host_bytes,
        "pinned_bytes": memory.pinned_bytes,
        "host_objects": [dataclasses.asdict(item) for item in memory.host_objects],
        "kv_tokens": memory.kv.tokens,
        "kv_sequences": memory.kv.sequences,
        "kv_separate_sequences": memory.kv.separate_sequences,
        "kv_needed_tokens": memory.kv.needed_tokens,
        "update_s": memory.update_s,
        "assumptions": list(assumptions(plan.memory_inputs)),
    }


def moments_summary(memory: MemoryLedger) -> list[dict[str, Any]]:
    """Every moment of a step in order."""
    return [
        {"name": moment.name, "phase": moment.phase, "bytes": moment.total_bytes, "objects": _objects(moment)}
        for moment in memory.moments
    ]


def _objects(moment: Moment) -> list[dict[str, Any]]:
    return [{"name": name, "class": CLASSES[name], "bytes": size} for name, size in moment.objects.items()]


def _memory_inputs(profile: Profile, shape: ModelShape, topology: Topology, tasks: TaskCounts) -> MemoryInputs:
    schedule, rollout = profile.schedule, profile.rollout
    overlap = schedule.name == "rollplex"
    lora = profile.lora
    return MemoryInputs(
        shape=shape,
        train_tp=topology.train_tp,
        rollout_tp=topology.rollout_tp,
        data_parallel=topology.data_parallel,
        groups=tasks.groups_per_training_group + rollout.extra_groups,
        prefixes_in_flight=schedule.prefixes_in_flight,
        group_size=rollout.group_size,
        max_prompt_tokens=profile.data.max_prompt_tokens,
        max_new_tokens=rollout.max_new_tokens,
        kv_tokens=rollout.kv_tokens,
        max_running_requests=rollout.max_running_requests,
        chunked_prefill_tokens=rollout.chunked_prefill_tokens,
        bytes_per_value=VALUE_BYTES[profile.model.dtype],
        has_reference=profile.algorithm.kl_coef > 0,
        overlap=overlap,
        early_groups=overlap and schedule.early_groups and profile.algorithm.advantage != "batch_std",
        prefix_activations=schedule.prefix_activations,
        prefix_kept_tokens=schedule.prefix_kept_tokens,
        prefix_pack_tokens=profile.prefix_pack_tokens,
        suffix_kept_layers=schedule.suffix_kept_layers,
        freeze_vision=profile.frozen_vision,
        vision_of_rollout=vision_source(profile) == "rollout",
        share_frozen_vision=profile.reuse.frozen_vision,
        chunk_elements=profile.optimizer.chunk_elements,
        master=profile.optimizer.master,
        prompt_cache_bytes=round(profile.data.cache_gib * GIB),
        on_gpu=profile.topology.device == "cuda",
        resident=profile.memory.residency == "resident",
        adapter_parameters=0 if lora is None else shape.adapter_parameters(lora.rank, lora.targets, topology.train_tp),
    )


def _gib(value: float | None) -> int | None:
    return None if value is None else round(value * GIB)
