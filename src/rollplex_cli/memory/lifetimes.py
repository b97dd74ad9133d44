"""The lifetime table (section 4 of the design): which task makes each object, which may use it, which uses it last.

Lifetimes are bounded by tasks. Objects of a prompt group are made and freed by tasks (`leases.ObjectStore`); those with
one place for the whole run lie in regions (`residency.Residency`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollplex_cli.core.names import TaskKind


class ObjectClass(StrEnum):
    """How an object comes back once it left device memory."""

    PERMANENT = "permanent"
    REGENERABLE = "regenerable"
    BOUNDARY = "boundary"
    PHASE_LOCAL = "phase_local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lifetime:
    """One row of the table.

    `maker` and `last_use` are task kinds; an object with neither lives as long as its engine.
    """

    name: str
    cls: ObjectClass
    owner: str
    """Which engine holds the memory."""
    maker: TaskKind | None
    users: frozenset[TaskKind]
    last_use: TaskKind | None
    per_group: bool
    relay: TaskKind | None = None
    """Hands the object over in the maker's place, on every rank alike, where ranks share out the making."""


def _row(
    name: str,
    cls: ObjectClass,
    owner: str,
    maker: TaskKind | None,
    users: set[TaskKind],
    last_use: TaskKind | None,
    *,
    per_group: bool,
    relay: TaskKind | None = None,
) -> Lifetime:
    return Lifetime(
        name=name, cls=cls, owner=owner, maker=maker, users=frozenset(users), last_use=last_use, per_group=per_group,
        relay=relay,
    )  # fmt: skip


_K, _C = TaskKind, ObjectClass
_READERS = {_K.DECODE, _K.PREFILL, _K.ENCODE, _K.ACTOR_PREFIX, _K.ACTOR_SUFFIX, _K.ACTOR_PREFIX_BACKWARD}

LIFETIMES: dict[str, Lifetime] = {
    row.name: row
    for row in (
        _row("snapshot", _C.REGENERABLE, "rollout", _K.PUBLISH, _READERS, _K.ACTOR_PREFIX_BACKWARD, per_group=False),
        _row("rollout_kv", _C.PHASE_LOCAL, "rollout", _K.DECODE, {_K.DECODE}, _K.DECODE, per_group=False),
        _row("vision_cache", _C.PHASE_LOCAL, "rollout", _K.DECODE, {_K.DECODE}, _K.DECODE, per_group=False),
        _row(
            "reference_weights",
            _C.REGENERABLE,
            "reference",
            None,
            {_K.REF_PREFIX, _K.REF_SUFFIX},
            _K.REF_SUFFIX,
            per_group=False,
        ),
        _row(
            "responses",
            _C.BOUNDARY,
            "rollout",
            _K.DECODE,
            {_K.EXCHANGE, _K.REWARD, _K.ADVANTAGE, _K.REF_SUFFIX, _K.ACTOR_SUFFIX, _K.ACTOR_PREFIX},
            _K.ACTOR_SUFFIX,
            per_group=True,
            relay=_K.EXCHANGE,
        ),
        # A prefix backward that recomputes a prefix above a frozen tower starts from them.
        _row(
            "vision_features",
            _C.BOUNDARY,
            "trainer",
            _K.ENCODE,
            {_K.REF_PREFIX, _K.ACTOR_PREFIX, _K.ACTOR_PREFIX_BACKWARD},
            _K.ACTOR_PREFIX_BACKWARD,
            per_group=True,
        ),
        _row(
            "reference_boundary",
            _C.BOUNDARY,
            "reference",
            _K.REF_PREFIX,
            {_K.REF_SUFFIX},
            _K.REF_SUFFIX,
            per_group=True,
        ),
        _row(
            "reference_logprobs",
            _C.BOUNDARY,
            "reference",
            _K.REF_SUFFIX,
            {_K.ADVANTAGE, _K.ACTOR_SUFFIX},
            _K.ACTOR_SUFFIX,
            per_group=True,
        ),
        _row("advantages", _C.BOUNDARY, "trainer", _K.ADVANTAGE, {_K.ACTOR_SUFFIX}, _K.ACTOR_SUFFIX, per_group=True),
        # The prefix activations behind the boundary's graph live and die with it.
        _row(
            "actor_boundary",
            _C.BOUNDARY,
            "trainer",
            _K.ACTOR_PREFIX,
            {_K.ACTOR_SUFFIX, _K.ACTOR_PREFIX_BACKWARD},
            _K.ACTOR_PREFIX_BACKWARD,
            per_group=True,
        ),
        _row(
            "gradients",
            _C.PHASE_LOCAL,
            "trainer",
            _K.ACTOR_SUFFIX,
            {_K.ACTOR_SUFFIX, _K.ACTOR_PREFIX_BACKWARD, _K.UPDATE},
            _K.UPDATE,
            per_group=False,
        ),
        _row("optimizer_state", _C.PERMANENT, "trainer", None, {_K.UPDATE}, None, per_group=False),
        # What the optimizer streams its state through; the state itself stays on the host.
        _row("optimizer_chunks", _C.PHASE_LOCAL, "trainer", _K.UPDATE, {_K.UPDATE}, _K.UPDATE, per_group=False),
    )
}
"""Rows by name."""


def freed_by(kind: TaskKind) -> tuple[str, ...]:
    """Per-group objects whose lifetime ends with a task of this kind."""
    return tuple(row.name for row in LIFETIMES.values() if row.per_group and row.last_use is kind)
