"""A trainer that may not work beside decode waits, and is woken in time."""

from __future__ import annotations

import threading
import time

import pytest

from rollplex_cli.core.names import Lane, Phase, TaskKey, TaskKind
from rollplex_cli.runtime.executor.executor import Executor
from rollplex_cli.runtime.executor.graph import build_step_graph
from rollplex_cli.runtime.executor.phases import PhaseMachine
from rollplex_cli.runtime.executor.schedules import schedule_from
from rollplex_cli.runtime.executor.theta import ThetaGuard

DEADLINE_S = 10.0


@pytest.mark.parametrize("how", ["a batch that pays", "the end of decode"])
def test_prefixes_wait_until_they_may_run(how: str) -> None:
    started: list[tuple[TaskKey, Phase]] = []
    machine, allowed = PhaseMachine(), threading.Event()
    executor = Executor(
        build_step_graph([0], reference=False),
        schedule_from("rollplex", early_groups=True, prefixes_in_flight=0),
        machine,
        ThetaGuard(),
        dict.fromkeys(TaskKind, lambda key: started.append((key, machine.state))),
        may_overlap=allowed.is_set,
    )
    machine.to(Phase.GENERATE)
    lanes = [threading.Thread(target=executor.run, args=(lane,), daemon=True) for lane in (Lane.TRAINER, Lane.HOST)]
    for lane in lanes:
        lane.start()
    decode = TaskKey(TaskKind.DECODE, 0)
    executor.begin_decodes([decode])
    executor.touch()
    time.sleep(0.05)
    assert not started
    if how == "a batch that pays":
        allowed.set()
        executor.touch()
        _until(lambda: bool(started))
        assert started[0] == (TaskKey(TaskKind.ACTOR_PREFIX, 0), Phase.GENERATE)
    executor.complete_decode(decode)
    for phase in (Phase.LEARN, Phase.UPDATE):
        machine.to(phase)
        executor.phase_changed()
        if phase is Phase.LEARN:
            _until(lambda: executor.graph.all_terminal([TaskKind.ACTOR_PREFIX_BACKWARD]))
    for lane in lanes:
        lane.join(DEADLINE_S)
        assert not lane.is_alive()
    by_kind = {key.kind: phase for key, phase in started}
    if how == "the end of decode":
        assert by_kind[TaskKind.ACTOR_PREFIX] is Phase.LEARN
    assert by_kind[TaskKind.ACTOR_SUFFIX] is Phase.LEARN or how == "a batch that pays"


def _until(condition: object) -> None:
    assert callable(condition)
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)
