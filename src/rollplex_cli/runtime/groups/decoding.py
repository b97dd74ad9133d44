"""The decode of one step on one rank: which groups are submitted, handed over, replaced and left, and when."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

from rollplex_cli.core.names import TaskKey, TaskKind

if TYPE_CHECKING:
    from rollplex_cli.engines.rollout.base import GroupResult, RolloutEngine
    from rollplex_cli.profile.schema import RolloutProfile
    from rollplex_cli.runtime.executor.executor import Executor
    from rollplex_cli.runtime.pool import DecodePool
    from rollplex_cli.runtime.tasks import StepTasks
    from rollplex_cli.runtime.team.team import Team

BOARD_POLL_S = 0.001
"""How often a replica that has nothing left to decode looks whether the others have."""


class Decoding:
    """Made and run by the rollout lane.

    Args:
        tasks: of the step: prompts, records, requests, and what becomes of responses.
        executor: hears of every group in the logical order.
        engine, team, pool: of the rank.
        rollout: the profile's section.
        step: its number.
    """

    def __init__(
        self, tasks: StepTasks, executor: Executor, engine: RolloutEngine, team: Team, pool: DecodePool,
        rollout: RolloutProfile, step: int,
    ) -> None:  # fmt: skip
        self._tasks, self._executor, self._engine, self._team, self._pool = tasks, executor, engine, team, pool
        self._rollout, self._step = rollout, step
        self._board, self._refills = team.board, tasks.refills
        in_flight = {g: s.engine_id for g, s in enumerate(tasks.started) if s.engine_id is not None}
        # Ids of groups that go on stay what they were; new ones must not meet them.
        self._ids = {g: in_flight.get(g, self._new_id(g)) for g in tasks.inputs}
        self._groups = {engine_id: g for g, engine_id in self._ids.items()}
        self._goes_on = set(in_flight)
        self._waiting = set(tasks.inputs)
        self._clock = 0

    def run(self, started: float) -> None:
        """Decode, from the time `started` of the events on, until the step has its groups.

        On a failure the engine is emptied, so that whoever stopped the step may still checkpoint or evaluate.
        """
        tasks, engine, board = self._tasks, self._engine, self._board
        self._pool.open()
        engine.begin_step()
        board.begin_step(self._step, len(self._ids))
        self._executor.begin_decodes([_decode(g) for g in self._ids])
        self._team.launches.begin_decode(self._hear)
        own = self._team.own_groups(tasks.inputs)
        tasks.vision.begin(self._executor, own)
        engine.submit([tasks.request(g, self._ids[g]) for g in own if g not in self._goes_on])
        try:
            while not board.complete and not self._enough():
                self._turn(started)
            if self._waiting:
                self._leave()
            self._pool.end()
            self._executor.end_reserve()
        except BaseException:
            with contextlib.suppress(Exception):  # what stopped the step is the reason, not what cannot be saved
                engine.abort()
            self._pool.abandon()
            raise

    def _turn(self, started: float) -> None:
        """One step of the engine and what follows from it."""
        tasks, engine, board = self._tasks, self._engine, self._board
        results: list[GroupResult] = []
        progress = engine.has_work()
        if progress:
            self._clock += 1
            results = engine.step()
            tasks.vision.take(self._executor, engine.take_vision(), self._groups)
            for result in results:
                tasks.vision.close(self._executor, self._groups[result.group])
                tasks.take(result, _decode(self._groups[result.group]), started)
            if not engine.has_work() and not self._refills.active:
                # Before the last group is handed over: what follows may need the pool's memory.
                self._pool.end()
        completed = [(r.decode_step, self._groups[r.group]) for r in results]
        finished = not engine.has_work() and not self._refills.active
        board.advance(self._clock, completed, finished=finished)
        progress |= self._hear()
        self._replace()
        if progress:
            tasks.report_batch(engine.num_running)
            self._executor.touch()
        else:
            self._executor.raise_if_stopped()
            time.sleep(BOARD_POLL_S)

    def _hear(self) -> bool:
        """Hand over the groups whose turn it is; returns whether other replicas said anything."""
        moved = self._board.listen()
        for group in self._board.release():
            self._waiting.discard(group)
            self._executor.complete_decode(_decode(group))
            self._refills.completed(group, self._clock)
        return moved

    def _replace(self) -> None:
        """Look at the groups whose turn it is; those without a signal leave the step, further ones come for them."""
        for group in self._refills.due(self._clock, idle=not self._engine.has_work()):
            self._executor.await_task(TaskKey(TaskKind.REWARD, group))
            if not self._tasks.records[group].skipped:
                continue
            # At once, so that its boundaries are not held until its turn in the logical order.
            self._executor.cancel_group(group)
            new = self._tasks.replace(group)
            if new is None:
                continue
            self._ids[new] = self._new_id(new)
            self._groups[self._ids[new]] = new
            self._waiting.add(new)
            self._board.add_group()
            self._executor.admit(_decode(new))
            self._engine.submit([self._tasks.request(new, self._ids[new])])

    def _enough(self) -> bool:
        """Whether the step's share is complete and no group is left that was left too often."""
        started = self._tasks.started
        if len(self._waiting) + self._refills.num_unseen > self._rollout.extra_groups:
            return False
        return bool(started) and all(started[g].times < self._rollout.max_carries for g in self._waiting)

    def _leave(self) -> None:
        """Go on without the groups that are not complete."""
        keep, waiting = self._rollout.keep_partial, sorted(self._waiting)
        if keep:
            self._engine.pause()
        else:
            self._engine.abort([self._ids[g] for g in waiting])
        self._pool.end()
        for group in waiting:
            self._tasks.vision.leave(self._executor, group)
            self._executor.leave_decode(_decode(group))
            self._tasks.leave(group, self._ids[group] if keep else None)

    def _new_id(self, group: int) -> int:
        return (self._step << 20) + group if self._tasks.started else group


def _decode(group: int) -> TaskKey:
    return TaskKey(TaskKind.DECODE, group)
