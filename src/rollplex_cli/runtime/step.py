"""One step of a rank: the control thread's side of it."""

from __future__ import annotations

import dataclasses
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import ParityError, RunFailedError
from rollplex_cli.core.names import Lane, Phase, TaskKey, TaskKind
from rollplex_cli.rl.advantages import centred_square_sum, deviation
from rollplex_cli.runtime.executor.executor import Executor, StoppedError
from rollplex_cli.runtime.executor.graph import TaskGraph, build_step_graph, build_update_graph
from rollplex_cli.runtime.records import StepSums
from rollplex_cli.runtime.tasks import StepTasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.runtime.assembly.rank import Rank
    from rollplex_cli.runtime.executor.schedules import Schedule
    from rollplex_cli.runtime.groups.intake import Started

SHUT_DOWN_S = 20.0
"""How long lanes get to notice that a step was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step leaves: the metrics row (equal on all ranks but for times, and for what only the
    ranks that train know of the update) and this rank's group records."""

    row: dict[str, Any]
    tasks: StepTasks


def run_step(
    rank: Rank,
    step: int,
    inputs: Sequence[PromptInput],
    schedule: Schedule,
    *,
    lengths: Mapping[int, Sequence[int]] | None = None,
    profile: Profile | None = None,
    boundary: Callable[[TaskKey, str], None] | None = None,
    started: Sequence[Started] = (),
    further: Callable[[int], list[Started]] | None = None,
) -> StepResult:
    """Run one step from PUBLISH to PUBLISH.

    Args:
        inputs: prompts of the training group; group ids are their indices.
        lengths: see `StepTasks`.
        profile: the rank's own if None; benchmarks vary what is reused.
        boundary: see `Executor`.
        started, further: see `StepTasks`; `started` has one group per input.

    Raises:
        RollplexError: the first failure of any task, or that of a peer. The phase machine is then FAILED.
    """
    profile = profile or rank.profile
    tasks = StepTasks(
        profile, rank.engines, rank.store, rank.theta, rank.events, rank.memory.residency,
        team=rank.team, step=step, first_group=rank.first_group, inputs=dict(enumerate(inputs)), lengths=lengths,
        started=started, further=further,
    )  # fmt: skip
    in_reward = profile.algorithm.kl_in == "reward"
    graph = build_step_graph(
        range(len(inputs)), reference=rank.engines.reference is not None, kl_in_reward=in_reward,
        exchange=rank.team.responses is not None, prefix_from_rollout=tasks.takes_prefix,
        vision=tasks.vision.shared, trains=rank.team.place.trains, reserve=tasks.refills.reserve,
    )  # fmt: skip
    sharing, residency, apart = rank.sharing, rank.memory.residency, rank.team.topology.disaggregated
    executor = Executor(
        graph, schedule, rank.machine, rank.theta,
        sharing.around(residency.around(tasks.bodies()), lambda: rank.machine.state is Phase.GENERATE),
        may_overlap=(lambda: True) if apart else sharing.may_overlap,  # nothing to share: decode is elsewhere
        span=lambda key: rank.span(key.kind, Lane(graph.tasks[key].lane), key.group), boundary=boundary,
        channel=rank.team.channel,
    )  # fmt: skip
    tasks.check = executor.raise_if_stopped
    _follow(rank, executor)
    tasks.report_batch = sharing.report
    begun = time.monotonic()
    run = _Run(rank, executor, tasks, step, schedule)
    with _running(rank, executor, tasks):
        phase_s, sums, normalizer = run.phases()
    rank.store.end_step()
    # The lanes are done: nothing is unmapped after this, so steps can be compared.
    run.record_memory(Phase.PUBLISH)
    outcome = tasks.outcome
    assert outcome is not None or not rank.team.place.trains
    row = {
        "step": step,
        **sums.metrics(normalizer=normalizer, kl_in_reward=in_reward),
        "grad_norm": outcome.grad_norm if outcome is not None else None,
        "lr": outcome.lr if outcome is not None else None,
        "step_s": time.monotonic() - begun,
        "phase_s": phase_s,
    }
    return StepResult(row=row, tasks=tasks)


class _Run:
    """The sequence of phases of one step."""

    def __init__(self, rank: Rank, executor: Executor, tasks: StepTasks, step: int, schedule: Schedule) -> None:
        self.rank, self.executor, self.tasks, self.step = rank, executor, tasks, step
        self.schedule = schedule
        self.phase_s: dict[str, float] = {}

    def phases(self) -> tuple[dict[str, float], StepSums, float]:
        """Go through the phases; returns seconds by phase, the sums over all ranks and the normaliser."""
        tick = self.rank.control.tick
        self.rank.memory.meter.end_phase()  # what was held between the steps is no phase's
        with self._phase(Phase.GENERATE):
            self.executor.wait([TaskKind.DECODE], tick)
            if self.schedule.advantages_wait:
                self.executor.wait([TaskKind.REWARD], tick)
                self._agree_on_deviation()
        with self._phase(Phase.LEARN):
            self.executor.wait([TaskKind.ACTOR_PREFIX_BACKWARD, TaskKind.ACTOR_SUFFIX], tick)
            self.executor.drain()
            sums = self._agree_on_sums()
        self.tasks.scale = 1.0 / max(1, sums.weight)
        with self._phase(Phase.UPDATE):
            self.executor.wait([TaskKind.UPDATE], tick)
            self.executor.drain()
        if self.tasks.learner.num_updates > 1:
            for update in range(1, self.tasks.learner.num_updates):
                self._further_update(update)
            sums = self._agree_on_sums()
        with self._phase(Phase.PUBLISH):
            self.executor.wait([TaskKind.PUBLISH], tick)
        return self.phase_s, sums, float(max(1, sums.weight))

    def _further_update(self, update: int) -> None:
        """One more update from the same rollout: UPDATE -> LEARN -> UPDATE, boundaries under the new weights."""
        rank, learner, tick = self.rank, self.tasks.learner, self.rank.control.tick
        rank.store.end_step()
        wanted = set(learner.begin(update))
        # A rank that only decodes has no part in it, but hears the leader's turns like any other.
        graph = TaskGraph()
        if rank.team.place.trains:
            graph = build_update_graph([g for g in self.executor.graph.order if g in wanted])
        bodies = rank.sharing.around(rank.memory.residency.around(self.tasks.bodies()), lambda: False)
        executor = Executor(
            graph, self.schedule, rank.machine, rank.theta, bodies,
            span=lambda key: rank.span(key.kind, Lane(graph.tasks[key].lane), key.group), channel=rank.team.channel,
        )  # fmt: skip
        _follow(rank, executor)
        rank.control.watch(executor)
        main, self.executor = self.executor, executor
        job = rank.trainer_lane.submit(lambda: executor.run(Lane.TRAINER))
        try:
            with self._phase(Phase.LEARN):
                executor.wait([TaskKind.ACTOR_PREFIX_BACKWARD, TaskKind.ACTOR_SUFFIX], tick)
                executor.drain()
                name = f"step {self.step}: update {update}"
                weights = rank.peers.meet(name, {"weight": learner.weight if rank.team.leads else 0}, tick)
                self.tasks.scale = 1.0 / max(1, sum(value["weight"] for value in weights))
            with self._phase(Phase.UPDATE):
                executor.wait([TaskKind.UPDATE], tick)
                executor.drain()
            job.result(timeout=SHUT_DOWN_S)
        except BaseException:
            executor.stop()
            _settle([job])
            raise
        self.executor = main
        rank.control.watch(main)

    def _agree_on_deviation(self) -> None:
        """The standard deviation of all rewards of the batch around their groups' means."""
        own = {"square_sum": 0.0, "count": 0}
        for group in self._counted():
            rewards = self.tasks.records[group].rewards
            own["square_sum"] += centred_square_sum(rewards)
            own["count"] += len(rewards)
        values = self.rank.peers.meet(f"step {self.step}: rewards", own, self.rank.control.tick)
        total = sum(float(v["square_sum"]) for v in values)
        self.tasks.batch_std = deviation(total, sum(int(v["count"]) for v in values))

    @contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        started, t0 = time.monotonic(), self.rank.events.now()
        self.rank.control.go(self.rank.machine, phase)
        self.executor.phase_changed()
        yield
        self.phase_s[phase] = self.phase_s.get(phase, 0.0) + time.monotonic() - started
        self.rank.events.record(
            "phase", t0, self.rank.events.now(), step=self.step, phase=phase, lane="control", group=None
        )
        if phase is not Phase.PUBLISH:
            self.record_memory(phase)

    def record_memory(self, phase: Phase) -> None:
        """Write what the phase held at most."""
        measured = self.rank.memory.meter.end_phase()
        boundaries = self.rank.store.take_peaks()
        self.rank.events.point(
            "memory", step=self.step, phase=phase, lane="memory", boundaries=boundaries, **dataclasses.asdict(measured)
        )

    def _counted(self) -> list[int]:
        """Groups that this rank reports: every rank of a training group has the same records, one of them counts."""
        return sorted(self.tasks.records) if self.rank.team.leads else []

    def _agree_on_sums(self) -> StepSums:
        own = StepSums()
        for group in self._counted():
            own.add_group(self.tasks.records[group])
        total = StepSums()
        for values in self.rank.peers.meet(f"step {self.step}: sums", own.to_json(), self.rank.control.tick):
            total.add(StepSums.from_json(values))
        limit = self.rank.profile.guards.parity_limit
        if total.diff_mean > limit:
            worst = ", ".join(f"`{sample}` {mean:.2g}" for mean, sample in total.worst_groups)
            raise ParityError(
                f"rollout and trainer log-probs differ by {total.diff_mean:.3g} on average in step {self.step}, "
                f"more than `guards.parity_limit` allows: {limit:g}",
                hint=f"worst groups by mean difference: {worst}; nothing was updated in this step",
            )
        return total


def _follow(rank: Rank, executor: Executor) -> None:
    """Let objects live and end with the tasks of an executor that is about to run."""
    store, residency = rank.store, rank.memory.residency

    def ended(key: TaskKey) -> None:
        store.task_ended(key)
        residency.task_ended(key)

    rank.team.launches.check_with(executor.raise_if_stopped)
    residency.expect(executor.graph.tasks)
    executor.on_terminal = ended
    executor.between_tasks = residency.release_due


@contextmanager
def _running(rank: Rank, executor: Executor, tasks: StepTasks) -> Iterator[None]:
    """Lanes at work for the duration of the step; on a failure they are stopped and the cause is raised."""
    rank.control.watch(executor)
    jobs: list[Future[None]] = []
    try:
        jobs = [
            rank.trainer_lane.submit(lambda: tasks.run_trainer(executor)),
            rank.host_lane.submit(lambda: executor.run(Lane.HOST)),
            rank.rollout_lane.submit(lambda: tasks.run_rollout(executor)),
        ]
        yield
        for job in jobs:
            job.result(timeout=SHUT_DOWN_S)
    except BaseException as error:
        executor.stop()
        rank.machine.fail()
        _settle(jobs)
        cause = executor.failure if isinstance(error, StoppedError) else error
        if cause is None:
            raise RunFailedError("the step was stopped without a reason") from error
        raise cause from None if cause is not error else error.__cause__
    finally:
        rank.team.launches.end_step()
        rank.control.watch(None)


def _settle(jobs: Sequence[Future[None]]) -> None:
    deadline = time.monotonic() + SHUT_DOWN_S
    for job in jobs:
        try:
            job.exception(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:  # it sits in a call that cannot be interrupted; the process will end around it
            return
