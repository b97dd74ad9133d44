"""What a step would hold without one of the measures, or without any of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rollplex_cli.plan.memory.inputs import FLOAT32_BYTES
from rollplex_cli.plan.memory.objects import CLASSES, Moment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rollplex_cli.plan.memory.inputs import Ablation, MemoryInputs

ALL_STEP = {
    "no-kv-release": ("rollout_kv",),
    "no-reference-release": ("reference_weights",),
    "no-snapshot-release": ("snapshot",),
    "no-optimizer-chunks": (),
}
"""Objects that stay from the start of a step to its end when a measure is left out."""
OPTIMIZER_VALUES = 3
"""Float32 values per parameter: master weight, first and second moment."""


def held(moments: Sequence[Moment], names: Iterable[str]) -> tuple[Moment, ...]:
    """The moments of a step with some objects at their largest through all of it."""
    largest = {name: max(moment.objects.get(name, 0) for moment in moments) for name in names}
    return tuple(replace(moment, objects=_ordered(moment.objects | largest)) for moment in moments)


def without(moments: Sequence[Moment], inputs: MemoryInputs, names: Iterable[Ablation]) -> tuple[Moment, ...]:
    """The moments of a step without these measures."""
    left_out = set(names)
    if "naive" in left_out:
        return _everything_at_once(moments, inputs)
    found = held(moments, (name for ablation in left_out for name in ALL_STEP[ablation]))
    if "no-optimizer-chunks" not in left_out:
        return found
    resident = {"optimizer_state": optimizer_bytes(inputs), "optimizer_chunks": 0}
    return tuple(replace(moment, objects=_ordered(moment.objects | resident)) for moment in found)


def _everything_at_once(moments: Sequence[Moment], inputs: MemoryInputs) -> tuple[Moment, ...]:
    objects = {name: max(moment.objects.get(name, 0) for moment in moments) for name in CLASSES}
    objects |= {
        "optimizer_state": optimizer_bytes(inputs),
        "optimizer_chunks": 0,
        "second_weights": inputs.own_bytes,
        # It is what the second view costs in a publish, and here there is no view.
        "publish_staging": 0,
    }
    return tuple(replace(moment, objects=_ordered(objects)) for moment in moments)


def optimizer_bytes(inputs: MemoryInputs) -> int:
    """Optimizer state in device memory: float32 master and moments of every trained parameter, whole on each
    data-parallel rank (sharing them out is part of streaming them)."""
    return inputs.trained_parameters * OPTIMIZER_VALUES * FLOAT32_BYTES


def _ordered(objects: dict[str, int]) -> dict[str, int]:
    return {name: objects[name] for name in CLASSES if objects.get(name)}
