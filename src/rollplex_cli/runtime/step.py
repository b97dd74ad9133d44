"""One step of a rank: the control thread's side of it."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import ParityError, RunFailedError
from rollplex_cli.core.names import Lane, Phase, TaskKey, TaskKind
from rollplex_cli.runtime.executor.executor import Executor, StoppedError
from rollplex_cli.runtime.executor.graph import build_step_graph
from rollplex_cli.runtime.records import StepSums
from rollplex_cli.runtime.tasks import StepTasks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from concurrent.futures import Future

    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.runtime.assembly.rank import Rank
    from rollplex_cli.runtime.executor.schedules import Schedule

SHUT_DOWN_S = 20.0
"""How long lanes get to notice that a step was stopped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step leaves: the metrics row (equal on all ranks but for times) and this rank's group records."""

    row: dict[str, Any]
    tasks: StepTasks


def run_step(
    rank: Rank,
    step: int,
    inputs: Sequence[PromptInput],
    schedule: Schedule,
    *,
    lengths: Mapping[int, Sequence[int]] | None = None,
    boundary: Callable[[TaskKey, str], None] | None = None,
) -> StepResult:
    """Run one step from PUBLISH to PUBLISH.

    Args:
        inputs: this rank's prompts; group ids are their indices.
        lengths: see `StepTasks`.
        boundary: see `Executor`.

    Raises:
        RollplexError: the first failure of any task, or that of a peer. The phase machine is then FAILED.
    """
    tasks = StepTasks(
        rank.profile, rank.engines, rank.store, rank.theta, rank.events,
        step=step, first_group=rank.first_group, inputs=dict(enumerate(inputs)), lengths=lengths,
    )  # fmt: skip
    graph = build_step_graph(range(len(inputs)), reference=rank.engines.reference is not None)
    executor = Executor(
        graph, schedule, rank.machine, rank.theta, tasks.bodies(),
        span=lambda key: rank.span(key.kind, Lane(graph.tasks[key].lane), key.group), boundary=boundary,
    )  # fmt: skip
    executor.on_terminal = rank.store.task_ended
    started = time.monotonic()
    run = _Run(rank, executor, tasks, step)
    with _running(rank, executor, tasks):
        phase_s, sums, normalizer = run.phases()
    rank.store.end_step()
    outcome = tasks.outcome
    assert outcome is not None
    row = {
        "step": step,
        **sums.metrics(normalizer=normalizer),
        "grad_norm": outcome.grad_norm,
        "lr": outcome.lr,
        "step_s": time.monotonic() - started,
        "phase_s": phase_s,
    }
    return StepResult(row=row, tasks=tasks)


class _Run:
    """The sequence of phases of one step."""

    def __init__(self, rank: Rank, executor: Executor, tasks: StepTasks, step: int) -> None:
        self.rank, self.executor, self.tasks, self.step = rank, executor, tasks, step
        self.phase_s: dict[str, float] = {}

    def phases(self) -> tuple[dict[str, float], StepSums, float]:
        """Go through the phases; returns seconds by phase, the sums over all ranks and the normaliser."""
        tick = self.rank.control.tick
        with self._phase(Phase.GENERATE):
            self.executor.wait([TaskKind.DECODE], tick)
        with self._phase(Phase.LEARN):
            self.executor.wait([TaskKind.ACTOR_PREFIX_BACKWARD, TaskKind.ACTOR_SUFFIX], tick)
            self.executor.drain()
            sums = self._agree_on_sums()
        normalizer = self._normalizer(sums)
        self.tasks.scale = 1.0 / normalizer
        with self._phase(Phase.UPDATE):
            self.executor.wait([TaskKind.UPDATE], tick)
            self.executor.drain()
        with self._phase(Phase.PUBLISH):
            self.executor.wait([TaskKind.PUBLISH], tick)
        return self.phase_s, sums, normalizer

    @contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        started, t0 = time.monotonic(), self.rank.events.now()
        self.rank.control.go(self.rank.machine, phase)
        self.executor.phase_changed()
        yield
        self.phase_s[phase] = time.monotonic() - started
        self.rank.events.record(
            "phase", t0, self.rank.events.now(), step=self.step, phase=phase, lane="control", group=None
        )

    def _agree_on_sums(self) -> StepSums:
        own = StepSums()
        for group in sorted(self.tasks.records):
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

    def _normalizer(self, sums: StepSums) -> float:
        by_tokens = self.rank.profile.algorithm.loss_normalizer == "tokens"
        return float(max(1, sums.num_tokens if by_tokens else sums.num_responses))


@contextmanager
def _running(rank: Rank, executor: Executor, tasks: StepTasks) -> Iterator[None]:
    """Lanes at work for the duration of the step; on a failure they are stopped and the cause is raised."""
    rank.control.watch(executor)
    jobs: list[Future[None]] = []
    try:
        jobs = [
            rank.trainer_lane.submit(lambda: executor.run(Lane.TRAINER)),
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
        rank.control.watch(None)


def _settle(jobs: Sequence[Future[None]]) -> None:
    deadline = time.monotonic() + SHUT_DOWN_S
    for job in jobs:
        try:
            job.exception(timeout=max(0.0, deadline - time.monotonic()))
        except TimeoutError:  # it sits in a call that cannot be interrupted; the process will end around it
            return
