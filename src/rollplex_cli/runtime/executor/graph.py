"""The tasks of one step and what each waits for. Pure bookkeeping: no threads, no clock, no torch.

Logical order: groups are trained in the order in which their decode completed, which the rollout reports as
(decode step, group id). `order` holds it; wall-clock order of anything else never matters.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from rollplex_cli.core.names import Lane, TaskKey, TaskKind

if TYPE_CHECKING:
    from collections.abc import Iterable

LANES: dict[TaskKind, Lane] = {
    TaskKind.DECODE: Lane.ROLLOUT,
    # The part of a decode after which the rollout has the group's vision features.
    TaskKind.PREFILL: Lane.ROLLOUT,
    TaskKind.PUBLISH: Lane.ROLLOUT,
    TaskKind.REWARD: Lane.HOST,
    TaskKind.ADVANTAGE: Lane.HOST,
    # With training groups of several ranks this holds a collective, so it keeps to the lane whose order is agreed.
    TaskKind.EXCHANGE: Lane.TRAINER,
    # For the same reason, and because the trainer's own tower runs there.
    TaskKind.ENCODE: Lane.TRAINER,
    TaskKind.REF_PREFIX: Lane.TRAINER,
    TaskKind.REF_SUFFIX: Lane.TRAINER,
    TaskKind.ACTOR_PREFIX: Lane.TRAINER,
    TaskKind.ACTOR_SUFFIX: Lane.TRAINER,
    TaskKind.ACTOR_PREFIX_BACKWARD: Lane.TRAINER,
    TaskKind.UPDATE: Lane.TRAINER,
}

READS_THETA = frozenset(
    {
        TaskKind.DECODE, TaskKind.PREFILL, TaskKind.ENCODE,
        TaskKind.ACTOR_PREFIX, TaskKind.ACTOR_SUFFIX, TaskKind.ACTOR_PREFIX_BACKWARD,
    }
)  # fmt: skip
"""Tasks that read theta_k. The reference has weights of its own."""


_OF_AN_UPDATE = (TaskKind.ACTOR_PREFIX, TaskKind.ACTOR_SUFFIX, TaskKind.ACTOR_PREFIX_BACKWARD)


class TaskState(StrEnum):
    """Life of a task."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"


TERMINAL = frozenset({TaskState.DONE, TaskState.CANCELLED})


@dataclass(slots=True)
class Task:
    """A node of the graph."""

    key: TaskKey
    needs: frozenset[TaskKey]
    state: TaskState = TaskState.WAITING

    @property
    def lane(self) -> Lane:
        """The thread that runs it."""
        return LANES[self.key.kind]


@dataclass(slots=True)
class TaskGraph:
    """Tasks of one step on one rank."""

    tasks: dict[TaskKey, Task] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    """Groups in the logical order of their completion, so far."""
    reserve: set[int] = field(default_factory=set)
    """Groups that may yet be started in place of others; until then none of their tasks is ready."""
    follows_leader: bool = False
    """Whether the leader of the training group gives the turns, so that the order known here does not bind."""
    _trained: int = 0
    """Groups at the front of `order` whose gradient is complete or skipped."""

    def add(self, key: TaskKey, needs: Iterable[TaskKey] = ()) -> None:
        """Add a task; everything it needs must have been added before (so no cycle can exist)."""
        if key in self.tasks:
            raise ValueError(f"`{key}` is in the graph already")
        needs = frozenset(needs)
        unknown = [n for n in needs if n not in self.tasks]
        if unknown:
            raise ValueError(f"`{key}` needs `{unknown[0]}`, which is not in the graph")
        self.tasks[key] = Task(key, needs)

    def state(self, key: TaskKey) -> TaskState:
        """State of a task of the graph."""
        return self.tasks[key].state

    def is_terminal(self, key: TaskKey) -> bool:
        """Done, cancelled, or not part of this step."""
        task = self.tasks.get(key)
        return task is None or task.state in TERMINAL

    def all_terminal(self, kinds: Iterable[TaskKind]) -> bool:
        """Whether no task of these kinds is left to do."""
        wanted = set(kinds)
        return all(t.state in TERMINAL for t in self.tasks.values() if t.key.kind in wanted)

    def is_ready(self, key: TaskKey) -> bool:
        """Waiting, all needs done (a cancelled need counts), and, for a task that adds gradients, its turn."""
        task = self.tasks[key]
        if task.state is not TaskState.WAITING or key.group in self.reserve:
            return False
        if key.kind is TaskKind.ACTOR_SUFFIX and not self._has_turn(key.group):
            return False
        return all(self.is_terminal(n) for n in task.needs)

    def ready(self, lane: Lane) -> list[TaskKey]:
        """Tasks of `lane` that could start now, in the order they were added."""
        return [t.key for t in self.tasks.values() if t.lane is lane and self.is_ready(t.key)]

    def next_to_train(self) -> int | None:
        """First group of the logical order whose gradient is not complete; None while it is unknown."""
        while self._trained < len(self.order):
            group = self.order[self._trained]
            if not self.is_terminal(TaskKey(TaskKind.ACTOR_PREFIX_BACKWARD, group)):
                return group
            self._trained += 1
        return None

    def _has_turn(self, group: int) -> bool:
        return self.follows_leader or group == self.next_to_train()

    def start(self, key: TaskKey) -> None:
        """Mark a ready task as running."""
        if not self.is_ready(key):
            raise ValueError(f"`{key}` cannot start: it is {self.tasks[key].state}, needs {self.blocked_by(key)}")
        self.tasks[key].state = TaskState.RUNNING

    def complete(self, key: TaskKey) -> None:
        """Mark a running task as done. Decodes must be completed in logical order."""
        task = self.tasks[key]
        if task.state is not TaskState.RUNNING:
            raise ValueError(f"`{key}` completed while {task.state}")
        task.state = TaskState.DONE
        if key.kind is TaskKind.DECODE:
            self.order.append(key.group)

    def cancel(self, key: TaskKey) -> None:
        """Take a task out of the step. One that is running cannot be taken back."""
        task = self.tasks[key]
        if task.state is TaskState.RUNNING:
            raise ValueError(f"`{key}` is running and cannot be cancelled")
        if task.state is TaskState.WAITING:
            task.state = TaskState.CANCELLED

    def leave_decode(self, key: TaskKey) -> None:
        """Take a decode (or the prefill in it) that runs out of the step: what can be stopped half-way."""
        task = self.tasks[key]
        if key.kind not in (TaskKind.DECODE, TaskKind.PREFILL) or task.state is not TaskState.RUNNING:
            raise ValueError(f"`{key}` cannot be left while {task.state}")
        task.state = TaskState.CANCELLED

    def cancel_group(self, group: int) -> list[TaskKey]:
        """Cancel what has not started of a group; returns what was cancelled.

        A group whose suffix has begun is left alone: part of its gradient is in the arena already.
        """
        suffix = self.tasks.get(TaskKey(TaskKind.ACTOR_SUFFIX, group))
        if suffix is not None and suffix.state in (TaskState.RUNNING, TaskState.DONE):
            return []
        cancelled = [t.key for t in self.tasks.values() if t.key.group == group and t.state is TaskState.WAITING]
        for key in cancelled:
            self.cancel(key)
        return cancelled

    def blocked_by(self, key: TaskKey) -> list[str]:
        """What a waiting task still needs, for messages."""
        needs = [str(n) for n in sorted(self.tasks[key].needs) if not self.is_terminal(n)]
        if key.kind is TaskKind.ACTOR_SUFFIX and not self._has_turn(key.group):
            needs.append("its turn in the logical order")
        if key.group in self.reserve:
            needs.append("a group that it replaces")
        return needs


def build_update_graph(groups: Iterable[int]) -> TaskGraph:
    """A further update of the same rollout: boundaries anew, suffixes and backward of `groups`, in this order."""
    graph = TaskGraph()
    for g in groups:
        keys = [TaskKey(kind, g) for kind in _OF_AN_UPDATE]
        for key, needs in zip(keys, [[], *([k] for k in keys)], strict=False):
            graph.add(key, needs)
        graph.order.append(g)
    graph.add(TaskKey(TaskKind.UPDATE), [TaskKey(_OF_AN_UPDATE[-1], g) for g in graph.order])
    return graph


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedVision:
    """Vision features that are computed once for several roles."""

    groups: frozenset[int]
    """The groups that have any; those without media have not."""
    from_rollout: bool
    """Whether the rollout's prefill computes them; otherwise the trainer does."""
    for_reference: bool
    """Whether they are the reference's too: its tower is the actor's."""


def _add_encode(graph: TaskGraph, group: int, vision: SharedVision) -> list[TaskKey]:
    prefill, encode = TaskKey(TaskKind.PREFILL, group), TaskKey(TaskKind.ENCODE, group)
    if vision.from_rollout:
        graph.add(prefill)
    graph.add(encode, [prefill] if vision.from_rollout else [])
    return [encode]


def build_step_graph(
    groups: Iterable[int],
    *,
    reference: bool,
    exchange: bool = False,
    kl_in_reward: bool = False,
    prefix_from_rollout: bool = False,
    vision: SharedVision | None = None,
    trains: bool = True,
    reserve: Iterable[int] = (),
) -> TaskGraph:
    """The graph of section 1 of the design for one step.

    Args:
        groups: ids of the prompt groups this rank takes part in.
        reference: whether KL needs reference log-probs.
        exchange: whether responses come from other ranks of the training group.
        kl_in_reward: whether advantages need the reference's log-probs, and suffixes do not.
        prefix_from_rollout: whether the actor takes its boundary from the rollout, which has it when it decoded.
        vision: which groups' vision features are computed once for several roles.
        trains: whether this rank trains; one that does not decodes, hands the responses on and takes the weights.
        reserve: ids of further groups that may be started in place of others (`TaskGraph.reserve`).
    """
    graph = TaskGraph(reserve=set(reserve))
    last: list[TaskKey] = []
    for g in (*groups, *sorted(graph.reserve)):
        decode, prefix = TaskKey(TaskKind.DECODE, g), TaskKey(TaskKind.ACTOR_PREFIX, g)
        graph.add(decode)
        final = decode
        if exchange:
            final = TaskKey(TaskKind.EXCHANGE, g)
            graph.add(final, [decode])
        if not trains:
            last.append(final)
            continue
        reward, advantage = TaskKey(TaskKind.REWARD, g), TaskKey(TaskKind.ADVANTAGE, g)
        graph.add(reward, [final])
        encoded = _add_encode(graph, g, vision) if vision is not None and g in vision.groups else []
        graph.add(prefix, [*encoded, *([final] if prefix_from_rollout else [])])
        needs = [final, advantage, prefix]
        if reference:
            ref_prefix, ref_suffix = TaskKey(TaskKind.REF_PREFIX, g), TaskKey(TaskKind.REF_SUFFIX, g)
            graph.add(ref_prefix, encoded if vision is not None and vision.for_reference else [])
            graph.add(ref_suffix, [final, ref_prefix])
            if not kl_in_reward:
                needs.append(ref_suffix)
        graph.add(advantage, [reward, ref_suffix] if reference and kl_in_reward else [reward])
        suffix, backward = TaskKey(TaskKind.ACTOR_SUFFIX, g), TaskKey(TaskKind.ACTOR_PREFIX_BACKWARD, g)
        graph.add(suffix, needs)
        graph.add(backward, [suffix])
        last.append(backward)
    if trains:
        update = TaskKey(TaskKind.UPDATE)
        graph.add(update, last)
        last = [update]
    graph.add(TaskKey(TaskKind.PUBLISH), last)
    return graph
