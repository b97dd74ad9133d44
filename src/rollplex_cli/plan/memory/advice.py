"""The smallest change of a profile that makes a plan fit.

Changes are tried from the one that costs least: first settings that change no result, from cheap to dear, then the
topology, then what changes the job itself. A change takes its mildest value that fits.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rollplex_cli.plan.memory.ledger import compute_memory
from rollplex_cli.plan.topology import head_faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rollplex_cli.plan.memory.inputs import MemoryInputs

    Knob = Callable[[MemoryInputs], list["Change"]]
    """A setting: its changes from the mildest to the furthest, each needing at most what the one before needs."""

SMALLEST_CHUNK = 1 << 20
SMALLEST_PREFILL = 1024
SHORTEST_TOKENS = 64
"""No advice goes below these."""
KV_STEP = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a rank may use; None is no limit."""

    device_bytes: int | None
    host_bytes: int | None

    def excess(self, inputs: MemoryInputs) -> int:
        """Bytes over the limits, 0 if everything fits."""
        ledger = compute_memory(inputs)
        device = 0 if self.device_bytes is None else max(0, ledger.budgeted_bytes - self.device_bytes)
        # On a CPU the planned objects lie in host memory, too.
        host = ledger.host_bytes + (0 if inputs.on_gpu else ledger.peak_bytes)
        return device + (0 if self.host_bytes is None else max(0, host - self.host_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One key of the profile."""

    key: str
    value: str
    fields: Mapping[str, Any]
    """What it sets in `MemoryInputs`."""
    needs: tuple[str, ...] = ()
    """Settings without which the profile would refuse it, `KEY=VALUE` each."""

    @property
    def settings(self) -> tuple[str, ...]:
        """All that has to be set, `KEY=VALUE` each."""
        return (*self.needs, f"{self.key}={self.value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Changes that make a plan fit together, or the furthest that changes go."""

    changes: tuple[Change, ...]
    fits: bool
    peak_bytes: int
    host_bytes: int
    changes_job: bool
    """Whether one of them changes what is learned, or on what."""

    @property
    def settings(self) -> tuple[str, ...]:
        """All that has to be set, `KEY=VALUE` each."""
        return tuple(setting for change in self.changes for setting in change.settings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "set": list(self.settings),
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "host_bytes": self.host_bytes,
            "changes_job": self.changes_job,
        }


def advise(inputs: MemoryInputs, limits: Limits) -> Advice | None:
    """The first single change that is enough, else a combination; None where nothing is missing. Pure.

    Changes of the job are left for last, alone and in combinations.
    """
    if not limits.excess(inputs):
        return None
    for knobs in (SETTINGS, (*SETTINGS, *OF_THE_JOB)):
        for knob in knobs:
            found = _mildest(inputs, (), knob(inputs), limits)
            if found is not None:
                return _advice(inputs, (found,), limits)
        changes = _combination(inputs, knobs, limits)
        if not limits.excess(_applied(inputs, changes)):
            break
    return _advice(inputs, changes, limits)


def _combination(inputs: MemoryInputs, knobs: Sequence[Knob], limits: Limits) -> tuple[Change, ...]:
    """Each setting as far as it helps, until it is enough; then what is not needed is taken back, the dearest first."""
    taken: tuple[Change, ...] = ()
    for knob in knobs:
        now = _applied(inputs, taken)
        changes = knob(now)
        if not changes or limits.excess(replace(now, **changes[-1].fields)) >= limits.excess(now):
            continue
        mildest = _mildest(inputs, taken, changes, limits)
        taken = (*taken, mildest or changes[-1])
        if mildest is not None:
            return _relaxed(inputs, taken, knobs, limits)
    return taken


def _relaxed(
    inputs: MemoryInputs, taken: tuple[Change, ...], knobs: Sequence[Knob], limits: Limits
) -> tuple[Change, ...]:
    for change in reversed(taken):
        others = tuple(other for other in taken if other is not change)
        if not limits.excess(_applied(inputs, others)):
            taken = others
            continue
        for knob in knobs:
            milder = [c for c in knob(_applied(inputs, others)) if c.key == change.key]
            found = _mildest(inputs, others, milder, limits)
            if found is not None:
                taken = tuple(found if other is change else other for other in taken)
    return taken


def _applied(inputs: MemoryInputs, changes: Iterable[Change]) -> MemoryInputs:
    for change in changes:
        inputs = replace(inputs, **change.fields)
    return inputs


def _mildest(
    inputs: MemoryInputs, others: Iterable[Change], changes: Sequence[Change], limits: Limits
) -> Change | None:
    """The first of the changes, from mild to far, that is enough beside the others."""
    base = _applied(inputs, others)

    def enough(change: Change) -> bool:
        return not limits.excess(replace(base, **change.fields))

    if not changes or not enough(changes[-1]):
        return None
    return changes[bisect_left(changes, True, key=enough)]


def _advice(inputs: MemoryInputs, changes: tuple[Change, ...], limits: Limits) -> Advice:
    changed = _applied(inputs, changes)
    ledger = compute_memory(changed)
    settings = {change.key for knob in SETTINGS for change in knob(inputs)}
    return Advice(
        changes=changes,
        fits=not limits.excess(changed),
        peak_bytes=ledger.peak_bytes,
        host_bytes=ledger.host_bytes,
        changes_job=any(change.key not in settings for change in changes),
    )


def _numbers(key: str, field: str, values: Iterable[int]) -> list[Change]:
    return [Change(key=key, value=str(value), fields={field: value}) for value in values]


def _switch(key: str, value: str, field: str, to: Any, *, possible: bool) -> list[Change]:
    return [Change(key=key, value=value, fields={field: to})] if possible else []


def _halves(value: int, smallest: int, multiple: int = 1) -> Iterator[int]:
    while (value := value // 2 // multiple * multiple) >= smallest:
        yield value


def _chunk(inputs: MemoryInputs) -> list[Change]:
    values = _halves(inputs.chunk_elements, SMALLEST_CHUNK, 64)
    return _numbers("optimizer.chunk_elements", "chunk_elements", values)


def _kept_layers(inputs: MemoryInputs) -> list[Change]:
    values = range(inputs.kept_layers - 1, -1, -1)
    return _numbers("schedule.suffix_kept_layers", "suffix_kept_layers", values)


def _recompute(inputs: MemoryInputs) -> list[Change]:
    possible = inputs.prefix_activations != "recompute"
    return _switch("schedule.prefix_activations", "recompute", "prefix_activations", "recompute", possible=possible)


def _own_towers(inputs: MemoryInputs) -> list[Change]:
    possible = inputs.vision == "trainer"
    return _switch("reuse.frozen_vision", "false", "share_frozen_vision", False, possible=possible)


def _prompts_one_by_one(inputs: MemoryInputs) -> list[Change]:
    possible = inputs.prefix_pack_tokens > 0
    return _switch("schedule.prefix_pack_tokens", "0", "prefix_pack_tokens", 0, possible=possible)


def _prefixes_in_flight(inputs: MemoryInputs) -> list[Change]:
    # With a limit of n the group next in order is held besides.
    found = _numbers("schedule.prefixes_in_flight", "prefixes_in_flight", range(inputs.held_groups - 2, 0, -1))
    if not inputs.overlap:
        return []
    if not inputs.prefix_pack_tokens:
        return found
    one_by_one = ("schedule.prefix_pack_tokens=0",)
    return [replace(c, fields={**c.fields, "prefix_pack_tokens": 0}, needs=one_by_one) for c in found]


def _no_early_groups(inputs: MemoryInputs) -> list[Change]:
    return _switch("schedule.early_groups", "false", "early_groups", False, possible=inputs.early_groups)


def _prefill(inputs: MemoryInputs) -> list[Change]:
    values = _halves(inputs.chunked_prefill_tokens, SMALLEST_PREFILL)
    return _numbers("rollout.chunked_prefill_tokens", "chunked_prefill_tokens", values)


def _kv_tokens(inputs: MemoryInputs) -> list[Change]:
    """Down to one whole group: the least with which the responses of a prompt decode together."""
    least = inputs.max_prompt_tokens + inputs.group_size * inputs.max_new_tokens
    highest = (inputs.kv_tokens - 1) // KV_STEP * KV_STEP
    return _numbers("rollout.kv_tokens", "kv_tokens", range(highest, least - 1, -KV_STEP))


def _split_master(inputs: MemoryInputs) -> list[Change]:
    possible = inputs.master == "full" and inputs.bytes_per_value == 2
    return _switch("optimizer.master", "split", "master", "split", possible=possible)


def _rollout_tp(inputs: MemoryInputs) -> list[Change]:
    degrees = range(2 * inputs.rollout_tp, inputs.train_tp + 1, inputs.rollout_tp)
    fine = [d for d in degrees if not inputs.train_tp % d and not head_faults(inputs.shape, inputs.train_tp, d)]
    return _numbers("topology.rollout_tp", "rollout_tp", fine)


def _train_tp(inputs: MemoryInputs) -> list[Change]:
    """Fewer, larger training groups of the same ranks."""
    found = []
    degree, parallel, groups = inputs.train_tp, inputs.data_parallel, inputs.groups
    while parallel % 2 == 0:
        degree, parallel, groups = 2 * degree, parallel // 2, 2 * groups
        if head_faults(inputs.shape, degree, inputs.rollout_tp):
            break
        fields = {"train_tp": degree, "data_parallel": parallel, "groups": groups}
        found.append(Change(key="topology.train_tp", value=str(degree), fields=fields))
    return found


def _new_tokens(inputs: MemoryInputs) -> list[Change]:
    values = _halves(inputs.max_new_tokens, SHORTEST_TOKENS)
    return _numbers("rollout.max_new_tokens", "max_new_tokens", values)


def _group_size(inputs: MemoryInputs) -> list[Change]:
    return _numbers("rollout.group_size", "group_size", range(inputs.group_size - 1, 1, -1))


def _prompt_tokens(inputs: MemoryInputs) -> list[Change]:
    values = _halves(inputs.max_prompt_tokens, SHORTEST_TOKENS)
    return _numbers("data.max_prompt_tokens", "max_prompt_tokens", values)


def _freeze_vision(inputs: MemoryInputs) -> list[Change]:
    return _switch("model.freeze_vision", "true", "freeze_vision", True, possible=not inputs.freeze_vision)


def _no_reference(inputs: MemoryInputs) -> list[Change]:
    return _switch("algorithm.kl_coef", "0", "has_reference", False, possible=inputs.has_reference)


SETTINGS: tuple[Knob, ...] = (
    _chunk,
    _own_towers,
    _recompute,
    _kept_layers,
    _prefill,
    _prompts_one_by_one,
    _prefixes_in_flight,
    _no_early_groups,
    _kv_tokens,
    _split_master,
    _rollout_tp,
    _train_tp,
)
"""What changes no result but by the order of sums, from cheap to dear."""
OF_THE_JOB: tuple[Knob, ...] = (_new_tokens, _group_size, _prompt_tokens, _freeze_vision, _no_reference)
"""What changes the job."""
