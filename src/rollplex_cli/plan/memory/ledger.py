"""Bytes of one rank: device memory by moment and object, host memory by object, and time on the host link."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from rollplex_cli.plan.memory import activations
from rollplex_cli.plan.memory.ablations import held, without
from rollplex_cli.plan.memory.objects import CLASSES, IN_REGIONS, PHASES, Moment, moments
from rollplex_cli.plan.weights import weight_sharing

if TYPE_CHECKING:
    from rollplex_cli.plan.memory.inputs import Ablation, MemoryInputs
    from rollplex_cli.plan.memory.objects import ObjectClass, Phase

LINK_BYTES_PER_S = 46e9
"""Host link of one GPU, each way with both ways busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectBytes:
    """One object of the lifetime table."""

    name: str
    cls: ObjectClass
    phases: dict[str, int]
    """Phase to its largest size there; a phase in which the object is absent is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostObject:
    """Something in host memory."""

    name: str
    bytes: int
    pinned: bool


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
class KvCapacity:
    """What the rollout's KV pool holds, sequences at their longest."""

    tokens: int
    sequences: int
    """With prompts shared by the responses of a group."""
    separate_sequences: int
    """If every response had its own copy of the prompt."""
    needed_tokens: int
    """By all groups that a replica decodes in a step, at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLedger:
    """Bytes of one rank."""

    moments: tuple[Moment, ...]
    weights: WeightBytes
    naive_peak_bytes: int
    """If everything lay in device memory at once, with a second copy of the weights."""
    host_objects: tuple[HostObject, ...]
    kv: KvCapacity
    update_s: float | None
    """Time to stream the optimizer over the host link; None without a GPU."""
    on_gpu: bool

    @property
    def objects(self) -> tuple[ObjectBytes, ...]:
        """The table by object and phase."""
        found = []
        for name, cls in CLASSES.items():
            largest: dict[str, int] = {}
            for moment in self.moments:
                if size := moment.objects.get(name, 0):
                    largest[moment.phase] = max(largest.get(moment.phase, 0), size)
            if largest:
                found.append(ObjectBytes(name=name, cls=cls, phases=largest))
        return tuple(found)

    def peak_moment(self, phase: Phase | None = None) -> Moment:
        """The moment with the most bytes, of a phase or of the step."""
        return max((m for m in self.moments if phase in (None, m.phase)), key=lambda moment: moment.total_bytes)

    def phase_bytes(self, phase: Phase) -> int:
        """Bytes of the largest moment of a phase."""
        return self.peak_moment(phase).total_bytes

    @property
    def peak_bytes(self) -> int:
        """Bytes of the largest moment."""
        return max(self.phase_bytes(phase) for phase in PHASES)

    @property
    def budgeted_bytes(self) -> int:
        """The largest sum of what `memory.budget_gib` counts: everything on a GPU, on a CPU what lies in regions."""
        return self.peak_bytes if self.on_gpu else max(moment.region_bytes for moment in self.moments)

    @property
    def host_bytes(self) -> int:
        """Host memory of all planned objects."""
        return sum(item.bytes for item in self.host_objects)

    @property
    def pinned_bytes(self) -> int:
        """The part of `host_bytes` that is page-locked."""
        return sum(item.bytes for item in self.host_objects if item.pinned)


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationCost:
    """What leaving a measure out costs."""

    name: Ablation
    ledger: MemoryLedger
    extra_bytes: int
    """Peak without it less peak with it."""


def compute_memory(inputs: MemoryInputs) -> MemoryLedger:
    """The ledger of one rank. Pure."""
    planned = moments(inputs)
    if inputs.resident:
        planned = held(planned, IN_REGIONS)
    naive = without(planned, inputs, ("naive",))
    sharing = weight_sharing(inputs.shape, inputs.train_tp, inputs.rollout_tp, inputs.bytes_per_value)
    return MemoryLedger(
        moments=without(planned, inputs, inputs.without) if inputs.without else planned,
        weights=WeightBytes(
            identical_bytes=sharing.bytes_of("identical"),
            view_bytes=sharing.bytes_of("view"),
            rebuilt_bytes=sharing.bytes_of("rebuilt"),
            extra_bytes=sharing.extra_bytes,
        ),
        naive_peak_bytes=max(moment.total_bytes for moment in naive),
        host_objects=_host_objects(inputs),
        kv=kv_capacity(inputs),
        update_s=inputs.state_bytes / LINK_BYTES_PER_S if inputs.on_gpu else None,
        on_gpu=inputs.on_gpu,
    )


def ablation_costs(inputs: MemoryInputs, names: tuple[Ablation, ...]) -> tuple[AblationCost, ...]:
    """Each of these measures left out by itself."""
    peak = compute_memory(inputs).peak_bytes
    costs = []
    for name in names:
        ledger = compute_memory(replace(inputs, without=inputs.without | {name}))
        costs.append(AblationCost(name=name, ledger=ledger, extra_bytes=ledger.peak_bytes - peak))
    return tuple(costs)


def kv_capacity(inputs: MemoryInputs) -> KvCapacity:
    """Tokens as sequences. Whole groups first; what is left takes one more prompt and as many of its responses."""
    prompt, response, group = inputs.max_prompt_tokens, inputs.max_new_tokens, inputs.group_size
    whole, rest = divmod(inputs.kv_tokens, prompt + group * response)
    return KvCapacity(
        tokens=inputs.kv_tokens,
        sequences=whole * group + max(0, rest - prompt) // response,
        separate_sequences=inputs.kv_tokens // (prompt + response),
        needed_tokens=inputs.groups_per_replica * (prompt + group * response),
    )


def _host_objects(inputs: MemoryInputs) -> tuple[HostObject, ...]:
    found = [HostObject(name="optimizer_state", bytes=inputs.state_bytes, pinned=inputs.on_gpu)]
    if inputs.reference_bytes and inputs.on_gpu:
        # It comes back from a host copy only where it leaves the device.
        found.append(HostObject(name="reference_copy", bytes=inputs.reference_bytes, pinned=True))
    if inputs.prefix_activations == "host":
        found.append(HostObject(name="prefix_activations", bytes=activations.held_prefixes(inputs), pinned=False))
    if inputs.prompt_cache_bytes:
        found.append(HostObject(name="prompt_cache", bytes=inputs.prompt_cache_bytes, pinned=False))
    return tuple(found)
