"""The lifetime table in bytes: which object lies in device memory at which moment of a step.

A moment is a set of tasks that may run at one time. Moments are where peaks can be: lifetimes are bounded by tasks, so
between two moments nothing grows. On a CPU the same objects lie in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rollplex_cli.core.units import GIB
from rollplex_cli.plan.memory import activations
from rollplex_cli.plan.memory.inputs import FLOAT32_BYTES, STATE_BYTES
from rollplex_cli.plan.model import shard_count
from rollplex_cli.plan.weights import weight_sharing

if TYPE_CHECKING:
    from rollplex_cli.plan.memory.inputs import MemoryInputs

Phase = Literal["GENERATE", "LEARN", "UPDATE", "PUBLISH"]
ObjectClass = Literal["permanent", "regenerable", "boundary", "phase_local"]
PHASES: tuple[Phase, ...] = ("GENERATE", "LEARN", "UPDATE", "PUBLISH")

CHUNKS_IN_FLIGHT = 3
"""Optimizer chunks on the device: one arrives, one is updated, one leaves."""
GPU_PAGE_BYTES, CPU_PAGE_BYTES = 2 * 2**20, 4096
"""Least memory that can be mapped or unmapped."""
CONTEXT_BYTES = round(1.5 * GIB)
"""Context and decode graphs of one GPU process: 1.48 GiB on an H200, 3B shape (tools/gpu/memory/memory_check.py)."""
WORKSPACE_BYTES = round(0.55 * GIB)
"""What libraries keep through PyTorch's allocator, cuBLAS above all: 0.54 GiB in the same run."""
COMMUNICATION_BYTES = 3 * GIB - CONTEXT_BYTES - WORKSPACE_BYTES
"""Buffers of the collectives' groups, where there are several ranks (an estimate)."""
VISION_CACHE_BYTES = 512 * 2**20
"""Limit of the rollout on the vision embeddings it keeps."""

CLASSES: dict[str, ObjectClass] = {
    "snapshot": "regenerable",
    "rollout_kv": "phase_local",
    "vision_cache": "phase_local",
    "rollout_workspace": "phase_local",
    "reference_weights": "regenerable",
    "reference_boundary": "boundary",
    "actor_boundary": "boundary",
    "vision_features": "boundary",
    "boundary_gradients": "phase_local",
    "prefix_activations": "regenerable",
    "suffix_activations": "phase_local",
    "gradients": "phase_local",
    "optimizer_chunks": "permanent",
    "publish_staging": "phase_local",
    "second_weights": "regenerable",
    "optimizer_state": "permanent",
    "context_and_graphs": "permanent",
}
"""Objects in the order of tables and pictures. `second_weights` and `optimizer_state` are in device memory only where a
measure is left out."""
OF_ANY_ROLE = frozenset({"snapshot", "publish_staging", "context_and_graphs"})
OF_THE_ROLLOUT = frozenset({"rollout_kv", "vision_cache", "rollout_workspace"})
"""Of a rank that only decodes; all others are of one that only trains."""
IN_REGIONS = ("snapshot", "rollout_kv", "reference_weights", "gradients")
"""What lies in regions: it stays under `memory.residency: resident`, and on a CPU the budget counts nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What lies in device memory while certain tasks run."""

    name: str
    """The tasks."""
    phase: Phase
    objects: dict[str, int]
    """Bytes by object; absent objects are left out."""

    @property
    def total_bytes(self) -> int:
        """All objects together."""
        return sum(self.objects.values())

    @property
    def region_bytes(self) -> int:
        """What lies in regions."""
        return sum(size for name, size in self.objects.items() if name in IN_REGIONS)


def moments(inputs: MemoryInputs) -> tuple[Moment, ...]:
    """The moments of a step in order, every measure in place."""
    table = _Table(inputs)
    found = [table.decode()]
    if inputs.early_groups:
        found += [table.actor_suffix(beside_decode=True), table.prefix_backward(beside_decode=True)]
    if inputs.has_reference:
        if not inputs.overlap:
            found.append(table.ref_prefix())
        found.append(table.ref_suffix())
    return (*found, table.actor_suffix(), table.prefix_backward(), table.update(), table.publish())


def overhead_bytes(inputs: MemoryInputs) -> int:
    """What a GPU process takes whatever it computes."""
    if not inputs.on_gpu:
        return 0
    alone = inputs.train_tp * inputs.data_parallel == 1 and inputs.role == "both"
    return CONTEXT_BYTES + WORKSPACE_BYTES + (0 if alone else COMMUNICATION_BYTES)


class _Table:
    """Rows of the lifetime table."""

    def __init__(self, inputs: MemoryInputs) -> None:
        shape, size = inputs.shape, inputs.bytes_per_value
        self._inputs = inputs
        sharing = weight_sharing(shape, inputs.train_tp, inputs.rollout_tp, size)
        self._rollout = (shape.shard_parameters(inputs.rollout_tp) + inputs.adapter_parameters) * size
        self._own = self._rollout - foreign_bytes(inputs)
        token = shape.kv_bytes_per_token(inputs.train_tp, size)
        self._held = inputs.held_prompt_tokens * token
        self._boundary_gradients = (inputs.max_prompt_tokens + inputs.open_pack_tokens) * token
        self._kv = inputs.kv_tokens * shape.kv_bytes_per_token(inputs.rollout_tp, size)
        # prompts of a replica x merged patches (at most the prompt's tokens) x hidden x bytes
        embeddings = inputs.groups_per_replica * inputs.max_prompt_tokens * shape.hidden_size * size
        self._vision = min(VISION_CACHE_BYTES, embeddings)
        self._reference = inputs.reference_bytes
        self._reference_held = self._held if inputs.has_reference else 0
        self._gradients = inputs.trained_parameters * FLOAT32_BYTES
        self._kept_prefixes = activations.kept_prefixes(inputs)
        self._staging = sharing.staging_bytes
        self._features = inputs.held_features * activations.vision_features(inputs)

    def decode(self) -> Moment:
        """Decode; beside it, where the schedule overlaps, the prefixes of reference and actor one after the other."""
        beside = self._beside_decode() if self._inputs.overlap else self._rollout_part()
        prefix = self._kept_prefixes + self._forward() if self._inputs.overlap else 0
        name = "decode, prefixes" if self._inputs.overlap else "decode"
        if self._inputs.vision == "rollout":
            beside["vision_features"] = self._features  # its prefill makes them
        return self._moment(name, "GENERATE", **beside, prefix_activations=prefix)

    def ref_prefix(self) -> Moment:
        """A prefix of the reference after decode, where the schedule does not overlap."""
        return self._moment(
            "reference prefix", "LEARN", snapshot=self._own, reference_weights=self._reference,
            reference_boundary=self._reference_held, prefix_activations=self._forward(),
            vision_features=self._features,
        )  # fmt: skip

    def ref_suffix(self) -> Moment:
        """Scoring by the reference, all groups before the actor's first."""
        inputs = self._inputs
        # Role by role, no boundary of the actor exists yet.
        actor = self._held if inputs.overlap else 0
        return self._moment(
            "reference suffix", "LEARN", snapshot=self._own, reference_weights=self._reference,
            reference_boundary=self._reference_held, actor_boundary=actor, vision_features=self._features,
            prefix_activations=self._kept_prefixes if inputs.overlap else 0,
            suffix_activations=activations.scored_suffix(inputs),
        )  # fmt: skip

    def actor_suffix(self, *, beside_decode: bool = False) -> Moment:
        """Forward and backward of one group's responses."""
        suffix = activations.suffix_activations(self._inputs)
        return self._learning(
            "actor suffix", beside_decode, prefix_activations=self._kept_prefixes, suffix_activations=suffix
        )

    def prefix_backward(self, *, beside_decode: bool = False) -> Moment:
        """Backward of one group's prompt."""
        backward = self._kept_prefixes + activations.prefix_backward(self._inputs)
        return self._learning("prefix backward", beside_decode, prefix_activations=backward)

    def update(self) -> Moment:
        """The optimizer's stream."""
        return self._moment(
            "update", "UPDATE", snapshot=self._own, gradients=self._gradients,
            optimizer_chunks=chunk_bytes(self._inputs),
        )  # fmt: skip

    def publish(self) -> Moment:
        """The ranks of an exchange group bring one another what they updated."""
        return self._moment("publish", "PUBLISH", snapshot=self._rollout, publish_staging=self._staging)

    def _learning(self, name: str, beside_decode: bool, **own: int) -> Moment:
        common = {"boundary_gradients": self._boundary_gradients, "gradients": self._gradients, **own}
        common["vision_features"] = self._features
        if beside_decode:
            return self._moment(f"decode, {name}", "GENERATE", **{**self._beside_decode(), **common})
        return self._moment(name, "LEARN", snapshot=self._own, actor_boundary=self._held, **common)

    def _rollout_part(self) -> dict[str, int]:
        return {
            "snapshot": self._rollout,
            "rollout_kv": self._kv,
            "vision_cache": self._vision,
            "rollout_workspace": activations.rollout_workspace(self._inputs),
        }

    def _beside_decode(self) -> dict[str, int]:
        return {
            **self._rollout_part(),
            "reference_weights": self._reference,
            "reference_boundary": self._reference_held,
            "actor_boundary": self._held,
            "vision_features": self._features,
        }

    def _forward(self) -> int:
        return activations.prefix_forward(self._inputs)

    def _moment(self, name: str, phase: Phase, **objects: int) -> Moment:
        objects["context_and_graphs"] = overhead_bytes(self._inputs)
        present = {key: objects[key] for key in CLASSES if objects.get(key) and self._has(key)}
        return Moment(name=name, phase=phase, objects=present)

    def _has(self, name: str) -> bool:
        role = self._inputs.role
        return role == "both" or name in OF_ANY_ROLE or (role == "rollout") == (name in OF_THE_ROLLOUT)


def foreign_bytes(inputs: MemoryInputs) -> int:
    """Of a rollout shard: row ranges that other ranks train, whose pages can go between decode and publish, which
    writes every byte of them. Columns of other ranks lie between this rank's own and stay, as do shared heads.

    Only whole pages go: of a range at any offset, a page less than its size on average. Beside adapters nothing goes:
    no publish writes the weights again.
    """
    if inputs.adapter_parameters:
        return 0
    shape, heads = inputs.shape, inputs.shape.num_kv_heads
    page = GPU_PAGE_BYTES if inputs.on_gpu else CPU_PAGE_BYTES
    total = 0
    for group in shape.groups():
        if group.split == "rows" or (group.split == "kv_rows" and inputs.train_tp <= heads):
            held, own = (shard_count(group, tp, heads) for tp in (inputs.rollout_tp, inputs.train_tp))
            total += max(0, (held - own) * inputs.bytes_per_value - group.matrices * page)
    return total


def chunk_bytes(inputs: MemoryInputs) -> int:
    """What an update holds however many parameters there are: the chunks in flight, and scratch for one of them."""
    elements = min(inputs.chunk_elements, -(-inputs.trained_parameters // inputs.data_parallel))
    staged = CHUNKS_IN_FLIGHT * STATE_BYTES[inputs.master] if inputs.on_gpu else 0
    scratch = 0
    if inputs.master == "split":
        scratch += FLOAT32_BYTES  # the master, put together
    if inputs.bytes_per_value < FLOAT32_BYTES:
        scratch += inputs.bytes_per_value + 1  # the new weights, and which of them are not numbers
    if inputs.data_parallel > 1:
        scratch += inputs.bytes_per_value  # another rank's new weights
    return elements * (staged + scratch)
