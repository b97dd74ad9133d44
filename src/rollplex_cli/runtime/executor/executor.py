"""The executor: lanes take ready tasks from one graph, under one lock, in the order a schedule picks."""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from rollplex_cli.core.names import Lane, Phase, TaskKey
from rollplex_cli.runtime.executor.graph import LANES, READS_THETA, TaskGraph, TaskState
from rollplex_cli.runtime.executor.order import Action

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rollplex_cli.core.names import TaskKind
    from rollplex_cli.runtime.executor.order import OrderChannel
    from rollplex_cli.runtime.executor.phases import PhaseMachine
    from rollplex_cli.runtime.executor.schedules import Schedule
    from rollplex_cli.runtime.executor.theta import ThetaGuard


class Fence(Protocol):
    """Completion of work on a device stream; a torch.cuda.Event is one."""

    def wait(self) -> Any:
        """Make the current stream wait for it."""

    def synchronize(self) -> Any:
        """Make the calling thread wait for it."""


class StoppedError(Exception):
    """Raised inside a lane when the step was stopped from elsewhere; never shown to a user."""


class Executor:
    """Runs the tasks of one step on this rank's lanes.

    Invariants (tests cite them): a task starts only when the graph calls it ready and its phase allows it (E1);
    readers and the writer of theta are registered with the guard for exactly as long as the task runs (E2);
    after the first failure no further task starts and every waiting thread is woken (E3); completion is visible
    to other lanes only together with the task's fence (E4); where a training group has several ranks, every rank
    starts its trainer tasks in the order of the group's leader (E5).

    Args:
        graph, schedule: what to do, and in which order.
        machine, theta: phase of this rank, account of the weights.
        bodies: what each kind of task does. DECODE and PREFILL are driven from outside (`begin_decodes`,
            `complete_decode`).
        span: makes the event span around a task.
        boundary: called before and after each task (tests inject delays and faults there).
        channel: order of the training group, None where the group is this rank alone.
        may_overlap: asked before a trainer task starts beside decode; asked again after each decode step.
    """

    def __init__(
        self,
        graph: TaskGraph,
        schedule: Schedule,
        machine: PhaseMachine,
        theta: ThetaGuard,
        bodies: Mapping[TaskKind, Callable[[TaskKey], Fence | None]],
        *,
        span: Callable[[TaskKey], AbstractContextManager[Any]] | None = None,
        boundary: Callable[[TaskKey, str], None] | None = None,
        channel: OrderChannel | None = None,
        may_overlap: Callable[[], bool] | None = None,
    ) -> None:
        self.graph = graph
        self._schedule = schedule
        self._machine = machine
        self._theta = theta
        self._bodies = bodies
        self._span = span or (lambda _key: nullcontext())
        self._boundary = boundary or (lambda _key, _when: None)
        self._channel = channel
        self._may_overlap = may_overlap or (lambda: True)
        self._held_back = False
        graph.follows_leader = channel is not None and not channel.is_leader
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._failed_task: TaskKey | None = None
        self._stopped = False
        self._fences: dict[TaskKey, Fence] = {}
        self._running: dict[TaskKey, float] = {}
        self._to_cancel: list[int] = []
        self._cancelled: dict[int, list[TaskKey]] = {}
        self._last_progress = time.monotonic()
        self.num_progress = 0
        """Completed tasks and decode steps so far."""
        self.on_terminal: Callable[[TaskKey], None] = lambda _key: None
        """Called (under the executor's lock) when a task is done or cancelled; the object store frees by it."""
        self.between_tasks: Callable[[], None] = lambda: None
        """Called by a lane after each of its tasks, under no lock."""

    # ---- lanes -------------------------------------------------------------------------------------------

    def run(self, lane: Lane) -> None:
        """Run the tasks of `lane` until none is left. Called once per step on the lane's own thread.

        Raises:
            StoppedError: the step failed or was stopped elsewhere.
            Exception: whatever a task of this lane raised (the step is then failed).
        """
        try:
            while (key := self._next(lane)) is not None:
                self._run_task(key)
        except StoppedError:
            raise
        except BaseException as error:
            self.fail(error)
            raise

    def _next(self, lane: Lane) -> TaskKey | None:
        if lane is Lane.TRAINER and self._channel is not None:
            return self._next_in_group_order(self._channel)
        with self._changed:
            while True:
                self._raise_if_stopped()
                if not self._left(lane):
                    return None
                key = self._pick(lane)
                if key is not None:
                    self._start(key)
                    return key
                self._changed.wait()

    def _next_in_group_order(self, channel: OrderChannel) -> TaskKey | None:
        """Leader: decide, tell, do. Followers: hear, wait until it is possible here too, do."""
        while True:
            action, key = self._decide() if channel.is_leader else (Action.RUN, None)
            action, key = channel.exchange(action, key, self._raise_if_stopped)
            if action is Action.END:
                return None
            assert key is not None
            if action is Action.SKIP_GROUP:
                with self._changed:
                    self._cancel_group(key.group)
                continue
            if key not in self.graph.tasks:
                continue  # a rank that only decodes has the exchanges, and nothing else of what the leader orders
            with self._changed:
                # A follower may be behind the leader in decode or in its control thread's phase.
                while not (self.graph.is_ready(key) and self._machine.state in self._schedule.phases(key.kind)):
                    self._raise_if_stopped()
                    if self.graph.is_terminal(key):
                        raise RuntimeError(f"the leader ordered `{key}`, which is {self.graph.state(key)} here")
                    self._changed.wait()
                self._start(key)
            return key

    def _decide(self) -> tuple[Action, TaskKey | None]:
        with self._changed:
            while True:
                self._raise_if_stopped()
                if self._to_cancel:
                    return Action.SKIP_GROUP, TaskKey(next(iter(LANES)), self._to_cancel.pop(0))
                if not self._left(Lane.TRAINER):
                    return Action.END, None
                key = self._pick(Lane.TRAINER)
                if key is not None:
                    return Action.RUN, key
                self._changed.wait()

    def _pick(self, lane: Lane) -> TaskKey | None:
        phase = self._machine.state
        if lane is Lane.TRAINER:
            self._held_back = phase is Phase.GENERATE and not self._may_overlap()
            if self._held_back:
                return None
        return self._schedule.pick(self.graph, lane, phase)

    def _left(self, lane: Lane) -> bool:
        return any(t.lane is lane and not self.graph.is_terminal(t.key) for t in self.graph.tasks.values())

    def _start(self, key: TaskKey) -> None:
        self.graph.start(key)
        self._running[key] = time.monotonic()

    def _run_task(self, key: TaskKey) -> None:
        self._boundary(key, "before")
        self._wait_fences(key)
        reading = self._theta.read(str(key)) if key.kind in READS_THETA else nullcontext()
        with self._span(key), reading:
            fence = self._bodies[key.kind](key)
        self._boundary(key, "after")
        self._complete(key, fence)
        self.between_tasks()

    def _wait_fences(self, key: TaskKey) -> None:
        lane = LANES[key.kind]
        for need in self.graph.tasks[key].needs:
            fence = self._fences.get(need)
            if fence is not None and LANES[need.kind] is not lane:
                fence.wait()

    def _complete(self, key: TaskKey, fence: Fence | None) -> None:
        with self._changed:
            if fence is not None:
                self._fences[key] = fence
            self.graph.complete(key)
            self._running.pop(key, None)
            self.on_terminal(key)
            self._release_cancelled(key.group)
            self._progress()

    # ---- decode, driven by the rollout thread ------------------------------------------------------------

    def begin_decodes(self, keys: Iterable[TaskKey]) -> None:
        """Mark decodes as running (all of them share the rollout's batch) and as readers of theta."""
        with self._changed:
            self._raise_if_stopped()
            for key in keys:
                self._theta.begin_read(str(key))
                self._start(key)
            self._progress()

    def admit(self, key: TaskKey) -> None:
        """A group held in reserve becomes part of the step: its decode runs from now on."""
        with self._changed:
            self.graph.reserve.discard(key.group)
        self.begin_decodes([key])

    def end_reserve(self) -> None:
        """Nothing more is started: what is left in reserve is cancelled. `wait` for decodes cannot return before."""
        with self._changed:
            left = sorted(self.graph.reserve)
            self.graph.reserve.clear()
            for group in left:
                self._cancel_group(group)

    def await_task(self, key: TaskKey) -> None:
        """Block the calling lane until a task of another lane is done or cancelled.

        Raises:
            StoppedError: the step was stopped.
        """
        with self._changed:
            while not self.graph.is_terminal(key):
                self._raise_if_stopped()
                self._changed.wait()

    def complete_decode(self, key: TaskKey, fence: Fence | None = None) -> None:
        """The responses of a group are final, or its prompt is prefilled as soon as the device has reached `fence`.
        Decodes must be completed in logical order."""
        self._boundary(key, "after")
        self._theta.end_read(str(key))
        self._complete(key, fence)

    def leave_decode(self, key: TaskKey) -> None:
        """The step ends without this group's responses: its decode and everything behind it is cancelled."""
        self._theta.end_read(str(key))
        with self._changed:
            self.graph.leave_decode(key)
            self._running.pop(key, None)
            self.on_terminal(key)
            self._cancel_group(key.group)

    def touch(self) -> None:
        """Report progress inside a long task (a decode step), so that the stall watchdog sees it.

        Raises:
            StoppedError: the step was stopped.
        """
        with self._changed:
            self._raise_if_stopped()
            self._last_progress = time.monotonic()
            self.num_progress += 1
            if self._held_back and self._may_overlap():
                self._changed.notify_all()

    def raise_if_stopped(self) -> None:
        """Raise StoppedError if the step was stopped; says nothing about progress, unlike `touch`."""
        with self._changed:
            self._raise_if_stopped()

    # ---- control -----------------------------------------------------------------------------------------

    def cancel_group(self, group: int) -> None:
        """Take a group out of the step. In a training group only the leader may decide it, and tells the others."""
        with self._changed:
            if self._channel is None:
                self._cancel_group(group)
            elif self._channel.is_leader:
                self._to_cancel.append(group)
            self._changed.notify_all()

    def _cancel_group(self, group: int) -> None:
        self._cancelled.setdefault(group, []).extend(self.graph.cancel_group(group))
        self._release_cancelled(group)
        self._progress()

    def _release_cancelled(self, group: int) -> None:
        """Report the cancelled tasks of a group once none of its tasks runs: one that was running when the group was
        cancelled still uses what only they would have used after it."""
        tasks = self.graph.tasks.values() if group in self._cancelled else ()
        if not any(t.key.group == group and t.state is TaskState.RUNNING for t in tasks):
            for key in self._cancelled.pop(group, ()):
                self.on_terminal(key)

    def phase_changed(self) -> None:
        """Wake the lanes: the phase machine has moved."""
        with self._changed:
            self._progress()

    def fail(self, error: BaseException, task: TaskKey | None = None) -> None:
        """Stop the step because of `error`; the first failure is kept."""
        with self._changed:
            if self._failure is None and not isinstance(error, StoppedError):
                self._failure = error
                self._failed_task = task or next(iter(self._running), None)
            self._stopped = True
            self._changed.notify_all()

    def stop(self) -> None:
        """Stop the step without a failure of its own (a peer failed, or the run is shut down)."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @property
    def failure(self) -> BaseException | None:
        """The first error a task raised."""
        return self._failure

    @property
    def seconds_since_progress(self) -> float:
        """Age of the last completed task or decode step."""
        return time.monotonic() - self._last_progress

    def wait(self, kinds: Iterable[TaskKind], on_tick: Callable[[], None], tick_s: float = 0.1) -> None:
        """Block the control thread until no task of these kinds is left, calling `on_tick` meanwhile.

        Raises:
            BaseException: the failure of a task, or whatever `on_tick` raises.
        """
        kinds = tuple(kinds)
        while True:
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                self._raise_if_stopped()
                if self.graph.all_terminal(kinds):
                    return
                self._changed.wait(tick_s)
            on_tick()

    def drain(self) -> None:
        """Wait until the device has finished every task so far (invariant 1: drained, not only launched)."""
        for fence in list(self._fences.values()):
            fence.synchronize()

    def running(self, kind: TaskKind) -> list[tuple[TaskKey, float]]:
        """Tasks of a kind that run now, with the seconds since they started; the longest first."""
        with self._changed:
            now = time.monotonic()
            return [(k, now - since) for k, since in self._running.items() if k.kind is kind]

    def waiting_for(self) -> list[str]:
        """What runs and what could not start, for the message of the stall watchdog."""
        with self._changed:
            now = time.monotonic()
            running = [
                f"{LANES[k.kind]} lane: `{k}` running for {now - since:.0f} s" for k, since in self._running.items()
            ]
            left = [t.key for t in self.graph.tasks.values() if t.state is TaskState.WAITING]
            first = [
                f"`{k}` waits for {', '.join(self.graph.blocked_by(k)) or f'phase {self._phase_names(k)}'}"
                for k in left[:3]
            ]
            more = [f"{len(left) - 3} more tasks wait"] if len(left) > 3 else []
            return [*running[:6], *first, *more]

    def _phase_names(self, key: TaskKey) -> str:
        return " or ".join(sorted(self._schedule.phases(key.kind)))

    def _progress(self) -> None:
        self._last_progress = time.monotonic()
        self.num_progress += 1
        self._changed.notify_all()

    def _raise_if_stopped(self) -> None:
        if self._stopped or self._failure is not None:
            raise StoppedError
