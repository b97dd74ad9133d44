"""A first memory ledger: bytes of every object of one rank, phase by phase.

Upper bounds from the profile's limits, every product written out. On a CPU the same objects lie in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rollplex_cli.core.units import GIB
from rollplex_cli.plan.model import ModelShape
from rollplex_cli.plan.weights import weight_sharing

Phase = Literal["GENERATE", "LEARN", "UPDATE"]
ObjectClass = Literal["permanent", "regenerable", "boundary", "phase_local"]
PHASES: tuple[Phase, ...] = ("GENERATE", "LEARN", "UPDATE")

FLOAT32_BYTES = 4
OPTIMIZER_VALUES = 3
"""Float32 values per parameter: master weight, first and second moment."""
CHUNKS_IN_FLIGHT = 3
"""Optimizer chunks on the device: one loading, one updated, one leaving."""
CUDA_OVERHEAD_BYTES = 3 * GIB
"""Context, decode graphs and communication buffers of one GPU process (an estimate)."""
LINK_BYTES_PER_S = 46e9
"""Host link of one GPU, each way with both ways busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInputs:
    """What the ledger is computed from."""

    shape: ModelShape
    train_tp: int
    rollout_tp: int
    data_parallel: int
    groups: int
    """Prompt groups per training group and step."""
    prefixes_in_flight: int
    group_size: int
    max_prompt_tokens: int
    max_new_tokens: int
    kv_tokens: int
    bytes_per_value: int
    """Of weights and activations: 2 for bfloat16, 4 for float32."""
    has_reference: bool
    prefix_activations: Literal["keep", "host", "recompute"]
    chunk_elements: int
    on_gpu: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectBytes:
    """One object of the lifetime table."""

    name: str
    cls: ObjectClass
    phases: dict[str, int]
    """Phase to bytes; a phase in which the object is absent is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """How the training view of the weights lies in the rollout's copy."""

    identical_bytes: int
    """Row ranges and whole tensors: contiguous in both."""
    view_bytes: int
    """Column ranges: a view with the rollout's row stride."""
    rebuilt_bytes: int
    extra_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """Bytes of one rank."""

    objects: tuple[ObjectBytes, ...]
    weights: WeightBytes
    naive_peak_bytes: int
    """If every object lay in device memory at once, with a second copy of the weights and resident optimizer."""
    host_bytes: int
    """Host memory for optimizer state, the reference's copy and saved layer inputs."""
    pinned_bytes: int
    """The part of `host_bytes` that is page-locked."""
    update_s: float | None
    """Time to stream the optimizer over the host link; None without a GPU."""

    def phase_bytes(self, phase: str) -> int:
        """Bytes of all objects present in a phase."""
        return sum(item.phases.get(phase, 0) for item in self.objects)

    @property
    def peak_bytes(self) -> int:
        """Bytes in the largest phase."""
        return max(self.phase_bytes(phase) for phase in PHASES)


def compute_memory(inputs: MemoryInputs) -> MemoryLedger:
    """The ledger of one rank. Pure."""
    objects = tuple(item for item in _objects(inputs) if any(item.phases.values()))
    own = inputs.shape.shard_parameters(inputs.train_tp)
    # float32 master, first and second moment, one data-parallel share of them per rank
    optimizer = own * FLOAT32_BYTES * OPTIMIZER_VALUES // inputs.data_parallel
    # the reference comes back from a host copy only where it leaves the device
    reference = own * inputs.bytes_per_value if inputs.has_reference and inputs.on_gpu else 0
    saved = 0
    if inputs.prefix_activations == "host":
        # groups in flight x prompt tokens x layers x hidden x bytes
        saved = inputs.prefixes_in_flight * inputs.max_prompt_tokens * _layer_inputs_per_token(inputs)
    second_copy = own * inputs.bytes_per_value
    return MemoryLedger(
        objects=objects,
        weights=_weights(inputs),
        naive_peak_bytes=sum(max(item.phases.values()) for item in objects) + second_copy + optimizer,
        host_bytes=optimizer + reference + saved,
        pinned_bytes=optimizer + reference + saved if inputs.on_gpu else 0,
        update_s=optimizer / LINK_BYTES_PER_S if inputs.on_gpu else None,
    )


def _objects(inputs: MemoryInputs) -> list[ObjectBytes]:
    shape, size = inputs.shape, inputs.bytes_per_value
    own = shape.shard_parameters(inputs.train_tp) * size
    rollout = shape.shard_parameters(inputs.rollout_tp) * size
    boundary_token = shape.kv_bytes_per_token(inputs.train_tp, size)
    boundary = inputs.groups * inputs.max_prompt_tokens * boundary_token
    ahead = inputs.prefixes_in_flight * inputs.max_prompt_tokens * boundary_token
    pool = inputs.kv_tokens * shape.kv_bytes_per_token(inputs.rollout_tp, size)
    # prompts of a replica x merged patches (at most the prompt's tokens) x hidden x bytes
    replicas = inputs.train_tp // inputs.rollout_tp
    vision = -(-inputs.groups // replicas) * inputs.max_prompt_tokens * shape.hidden_size * size
    has = 1 if inputs.has_reference else 0
    prefix, suffix = _prefix_activations(inputs), _suffix_activations(inputs)
    gradients = shape.shard_parameters(inputs.train_tp) * FLOAT32_BYTES
    chunk = min(inputs.chunk_elements, shape.shard_parameters(inputs.train_tp))
    # chunks in flight x elements x (master, m, v) x float32
    chunks = CHUNKS_IN_FLIGHT * chunk * OPTIMIZER_VALUES * FLOAT32_BYTES
    overhead = CUDA_OVERHEAD_BYTES if inputs.on_gpu else 0
    return [
        _object("snapshot", "regenerable", GENERATE=rollout, LEARN=own, UPDATE=own),
        _object("rollout_kv", "phase_local", GENERATE=pool),
        _object("vision_cache", "phase_local", GENERATE=vision),
        _object("reference_weights", "regenerable", GENERATE=own * has, LEARN=own * has),
        _object("reference_boundary", "boundary", GENERATE=boundary * has, LEARN=boundary * has),
        _object("actor_boundary", "boundary", GENERATE=ahead, LEARN=ahead),
        _object("prefix_activations", "regenerable", GENERATE=prefix, LEARN=prefix),
        _object("suffix_activations", "phase_local", LEARN=suffix),
        _object("gradients", "phase_local", LEARN=gradients, UPDATE=gradients),
        _object("optimizer_chunks", "permanent", UPDATE=chunks),
        _object("context_and_graphs", "permanent", GENERATE=overhead, LEARN=overhead, UPDATE=overhead),
    ]


def _object(name: str, cls: ObjectClass, **phases: int) -> ObjectBytes:
    return ObjectBytes(name=name, cls=cls, phases={phase: size for phase, size in phases.items() if size})


def _layer_bytes_per_token(inputs: MemoryInputs) -> int:
    """What autograd keeps of one token in one layer of the language model on one training rank."""
    shape, tp = inputs.shape, inputs.train_tp
    kv = max(1, shape.num_kv_heads // tp) * shape.head_dim
    whole = 4 * shape.hidden_size  # inputs and outputs of both norms
    attention = 2 * shape.hidden_size // tp + 2 * kv  # query and attention output; key and value
    mlp = 3 * shape.intermediate_size // tp  # gate, up, their product
    return (whole + attention + mlp) * inputs.bytes_per_value


def _layer_inputs_per_token(inputs: MemoryInputs) -> int:
    """The hidden states that enter every layer, for one token."""
    return inputs.shape.num_layers * inputs.shape.hidden_size * inputs.bytes_per_value


def _prefix_activations(inputs: MemoryInputs) -> int:
    tokens, layer = inputs.max_prompt_tokens, _layer_bytes_per_token(inputs)
    if inputs.prefix_activations == "keep":
        # groups in flight x prompt tokens x layers x bytes of a layer
        return inputs.prefixes_in_flight * tokens * inputs.shape.num_layers * layer
    if inputs.prefix_activations == "host":
        return tokens * layer
    # one group at a time: layer inputs of its second forward, and one layer in full
    return tokens * (_layer_inputs_per_token(inputs) + layer)


def _suffix_activations(inputs: MemoryInputs) -> int:
    # one group at a time: responses x tokens each
    tokens = inputs.group_size * inputs.max_new_tokens
    # float32 logits of the vocabulary shard and their gradient
    logits = 2 * FLOAT32_BYTES * -(-inputs.shape.vocab_size // inputs.train_tp)
    if inputs.prefix_activations == "keep":
        return tokens * (inputs.shape.num_layers * _layer_bytes_per_token(inputs) + logits)
    return tokens * (_layer_inputs_per_token(inputs) + _layer_bytes_per_token(inputs) + logits)


def _weights(inputs: MemoryInputs) -> WeightBytes:
    sharing = weight_sharing(inputs.shape, inputs.train_tp, inputs.rollout_tp, inputs.bytes_per_value)
    return WeightBytes(
        identical_bytes=sharing.bytes_of("identical"),
        view_bytes=sharing.bytes_of("view"),
        rebuilt_bytes=sharing.bytes_of("rebuilt"),
        extra_bytes=sharing.extra_bytes,
    )
