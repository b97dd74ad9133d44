"""Schedules: an order over the task graph. Pure functions of the graph's state; none changes a result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex_cli.core.names import Lane, Phase, TaskKey, TaskKind
from rollplex_cli.runtime.executor.graph import TaskState

if TYPE_CHECKING:
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.runtime.executor.graph import TaskGraph

_PREFIXES = frozenset({TaskKind.REF_PREFIX, TaskKind.ACTOR_PREFIX})
_SUFFIXES = frozenset({TaskKind.REF_SUFFIX, TaskKind.ACTOR_SUFFIX, TaskKind.ACTOR_PREFIX_BACKWARD})
_REFERENCE = frozenset({TaskKind.REF_PREFIX, TaskKind.REF_SUFFIX})
_HELD_FROM_TO = {
    TaskKind.REF_PREFIX: TaskKind.REF_SUFFIX,
    TaskKind.ACTOR_PREFIX: TaskKind.ACTOR_PREFIX_BACKWARD,
}
"""A prefix task makes a boundary; the task it maps to uses it last."""

# Within a group, the task nearest to freeing its boundary comes first.
_TOWARDS_THE_END = (
    TaskKind.ACTOR_PREFIX_BACKWARD,
    TaskKind.ACTOR_SUFFIX,
    TaskKind.REF_SUFFIX,
    TaskKind.REF_PREFIX,
    TaskKind.ACTOR_PREFIX,
    TaskKind.ENCODE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`colocate` (everything after decode, role by role) or `rollplex` (prefixes beside decode). `disagg` has the order
    of `colocate`: what differs is which rank has which tasks."""

    overlap: bool
    """Whether prefixes may run beside decode."""
    early_groups: bool = False
    """Whether complete groups are trained while others still decode. Needs `overlap`."""
    never_beside_decode: frozenset[TaskKind] = frozenset()
    """Kinds of tasks that wait for the end of decode whatever else overlaps; benchmarks leave parts out with it."""
    prefixes_in_flight: int = 0
    """Boundaries held per role ahead of use; 0 is no limit. The group next in the logical order is exempt,
    or the step could wait for ever for a slot that only that group can free."""
    advantages_wait: bool = False
    """Whether advantages need the rewards of the whole batch, of every rank: they are computed in LEARN, which all
    ranks enter after they have agreed on it."""

    def phases(self, kind: TaskKind) -> frozenset[Phase]:
        """Phases in which a task of this kind may start."""
        if kind in (TaskKind.DECODE, TaskKind.PREFILL):
            return frozenset({Phase.GENERATE})
        if kind is TaskKind.UPDATE:
            return frozenset({Phase.UPDATE})
        if kind is TaskKind.PUBLISH:
            return frozenset({Phase.PUBLISH})
        if kind is TaskKind.ADVANTAGE and self.advantages_wait:
            return frozenset({Phase.LEARN})
        beside_decode = (
            kind in (TaskKind.REWARD, TaskKind.ADVANTAGE, TaskKind.EXCHANGE)
            or ((kind in _PREFIXES or kind is TaskKind.ENCODE) and self.overlap)
            or (kind in _SUFFIXES and self.overlap and self.early_groups)
        )
        beside_decode = beside_decode and kind not in self.never_beside_decode
        return frozenset({Phase.GENERATE, Phase.LEARN}) if beside_decode else frozenset({Phase.LEARN})

    def pick(self, graph: TaskGraph, lane: Lane, phase: Phase) -> TaskKey | None:
        """The task `lane` should start now, or None if none may."""
        ready = [k for k in graph.ready(lane) if phase in self.phases(k.kind)]
        if lane is not Lane.TRAINER:
            return ready[0] if ready else None
        exchange = [k for k in ready if k.kind is TaskKind.EXCHANGE]
        if exchange:
            return exchange[0]
        if not self.overlap:
            return self._pick_by_role(graph, ready)
        return self._pick_beside_decode(graph, ready, phase)

    def _pick_by_role(self, graph: TaskGraph, ready: list[TaskKey]) -> TaskKey | None:
        """All of the reference, then all of the actor, each group by group. Where nothing overlaps the actor
        makes nothing for a group before its turn, though the one in turn may wait for its reward: the memory plan
        counts what one group holds."""
        reference_done = graph.all_terminal(_REFERENCE)
        allowed = [k for k in ready if reference_done or k.kind in _REFERENCE or k.kind is TaskKind.ENCODE]
        if reference_done and not self.overlap:
            head = graph.next_to_train()
            allowed = [k for k in allowed if k.group == head or k.kind not in (TaskKind.ENCODE, TaskKind.ACTOR_PREFIX)]
        return self._finish_first(graph, allowed)

    def _pick_beside_decode(self, graph: TaskGraph, ready: list[TaskKey], phase: Phase) -> TaskKey | None:
        """Prefixes first while decode runs (they are what can only be hidden there), reference before actor, each with
        the vision features it waits for, then whatever ends a group soonest. Once decode is over all of the reference,
        so that its weights are gone before the actor's activations come."""
        if phase is Phase.GENERATE:
            for kind in (TaskKind.REF_PREFIX, TaskKind.ENCODE, TaskKind.ACTOR_PREFIX):
                for key in ready:
                    if key.kind is kind and (kind is TaskKind.ENCODE or self._has_slot(graph, key)):
                        return key
            return self._finish_first(graph, ready)
        return self._pick_by_role(graph, ready)

    def _finish_first(self, graph: TaskGraph, ready: list[TaskKey]) -> TaskKey | None:
        head = graph.next_to_train()
        ranked = sorted(
            (k for k in ready if k.kind not in _PREFIXES or self._has_slot(graph, k)),
            key=lambda k: (k.group != head, _rank(k.kind)),
        )
        return ranked[0] if ranked else None

    def _has_slot(self, graph: TaskGraph, key: TaskKey) -> bool:
        if self.prefixes_in_flight == 0 or key.group == graph.next_to_train():
            return True
        last_use = _HELD_FROM_TO[key.kind]
        held = sum(
            1
            for task in graph.tasks.values()
            if task.key.kind is key.kind
            and task.state in (TaskState.RUNNING, TaskState.DONE)
            and not graph.is_terminal(TaskKey(last_use, task.key.group))
        )
        return held < self.prefixes_in_flight


def _rank(kind: TaskKind) -> int:
    return _TOWARDS_THE_END.index(kind) if kind in _TOWARDS_THE_END else len(_TOWARDS_THE_END)


def schedule_from(name: str, *, early_groups: bool, prefixes_in_flight: int, advantages_wait: bool = False) -> Schedule:
    """The schedule of a name."""
    overlap = name == "rollplex"
    return Schedule(
        overlap=overlap, early_groups=early_groups and overlap, prefixes_in_flight=prefixes_in_flight,
        advantages_wait=advantages_wait,
    )  # fmt: skip


def schedule_of(profile: Profile, name: str | None = None) -> Schedule:
    """The schedule that a profile names, or the one of this `name` with the profile's settings."""
    settings = profile.schedule
    return schedule_from(
        settings.name if name is None else name, early_groups=settings.early_groups,
        prefixes_in_flight=settings.prefixes_in_flight, advantages_wait=profile.algorithm.advantage == "batch_std",
    )  # fmt: skip
