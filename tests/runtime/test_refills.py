"""Groups without a signal are replaced: the account, the graph's reserve, and the waits between lanes."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from rollplex_cli.core.names import Lane, Phase, TaskKey, TaskKind
from rollplex_cli.profile.load import load_profile
from rollplex_cli.runtime.executor.executor import Executor, StoppedError
from rollplex_cli.runtime.executor.graph import TaskState, build_step_graph
from rollplex_cli.runtime.executor.phases import PhaseMachine
from rollplex_cli.runtime.executor.schedules import schedule_from
from rollplex_cli.runtime.executor.theta import ThetaGuard
from rollplex_cli.runtime.groups.learning import Learner
from rollplex_cli.runtime.groups.refills import LOOK_AFTER_STEPS, Refills

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollplex_cli.runtime.groups.intake import Started

K = TaskKind


def line() -> Callable[[int], list[Started]]:
    """Further groups with the numbers 100, 101, ..."""
    numbers = iter(range(100, 200))
    return lambda count: [SimpleNamespace(number=next(numbers)) for _ in range(count)]  # type: ignore[misc]


def test_a_group_is_looked_at_by_decode_steps() -> None:
    refills = Refills([0, 1, 2], 1, line())
    refills.completed(2, 5)
    refills.completed(0, 6)
    assert refills.due(4 + LOOK_AFTER_STEPS, idle=False) == []
    assert refills.due(5 + LOOK_AFTER_STEPS, idle=False) == [2]
    assert refills.num_unseen == 1
    refills.completed(1, 7)
    assert refills.due(8, idle=True) == [0, 1]
    assert refills.num_unseen == 0


def test_a_place_is_given_on_so_often() -> None:
    refills = Refills([0, 1], 2, line())
    assert list(refills.reserve) == [2, 3, 4, 5]
    found: list[Any] = [refills.replace(group) for group in (1, 2, 0, 3)]
    assert [(new, started.number) for new, started in found[:3]] == [(2, 100), (3, 101), (4, 102)]
    assert found[3] is None
    assert [refills.round_of(group) for group in range(5)] == [0, 0, 1, 2, 1]


def test_nothing_is_replaced_without_a_line() -> None:
    refills = Refills([0, 1], 2)
    assert not refills.active and not list(refills.reserve) and refills.replace(0) is None
    refills.completed(0, 1)
    assert refills.due(100, idle=True) == []


def test_a_replacement_has_the_minibatch_of_its_place() -> None:
    learner = Learner(load_profile("tiny", ["algorithm.num_minibatches=2"]), [0, 1, 2, 3])
    for group, by in ((3, 4), (0, 5), (4, 6)):
        learner.replace(group, by)
    assert [learner.trains(group) for group in range(7)] == [True, True, False, False, False, True, False]


def executor_of(name: str) -> tuple[Executor, PhaseMachine, list[str]]:
    """Two groups and two in reserve; bodies write their names down."""
    log: list[str] = []
    machine = PhaseMachine()
    graph = build_step_graph([0, 1], reference=False, reserve=[2, 3])
    schedule = schedule_from(name, early_groups=True, prefixes_in_flight=0)
    bodies = dict.fromkeys(K, lambda key: log.append(str(key)))
    return Executor(graph, schedule, machine, ThetaGuard(), bodies), machine, log


@pytest.mark.parametrize("name", ["colocate", "rollplex"])
def test_a_step_with_a_reserve(name: str) -> None:
    executor, machine, log = executor_of(name)
    lanes = [threading.Thread(target=executor.run, args=(lane,), daemon=True) for lane in (Lane.HOST, Lane.TRAINER)]
    machine.to(Phase.GENERATE)
    for lane in lanes:
        lane.start()
    executor.begin_decodes([TaskKey(K.DECODE, 0), TaskKey(K.DECODE, 1)])
    for group in (1, 0):
        executor.complete_decode(TaskKey(K.DECODE, group))
        executor.await_task(TaskKey(K.REWARD, group))
        assert f"reward[{group}]" in log
    assert not executor.graph.all_terminal([K.DECODE])
    executor.cancel_group(1)
    executor.admit(TaskKey(K.DECODE, 2))
    executor.complete_decode(TaskKey(K.DECODE, 2))
    executor.end_reserve()
    for wanted, phase in (([K.DECODE], Phase.LEARN), ([K.ACTOR_PREFIX_BACKWARD], Phase.UPDATE), ([K.UPDATE], None)):
        executor.wait(wanted, lambda: None, tick_s=0.01)
        if phase is not None:
            machine.to(phase)
            executor.phase_changed()
    for lane in lanes:
        lane.join(10)
        assert not lane.is_alive()
    assert executor.graph.state(TaskKey(K.DECODE, 3)) is TaskState.CANCELLED
    assert [entry for entry in log if entry.startswith("actor_suffix")][-2:] == ["actor_suffix[0]", "actor_suffix[2]"]
    assert not [entry for entry in log if entry.endswith("[3]")]


def test_nothing_of_the_reserve_is_ready() -> None:
    executor, _, _ = executor_of("rollplex")
    graph = executor.graph
    assert graph.ready(Lane.TRAINER) == [TaskKey(K.ACTOR_PREFIX, 0), TaskKey(K.ACTOR_PREFIX, 1)]
    assert graph.blocked_by(TaskKey(K.ACTOR_PREFIX, 2)) == ["a group that it replaces"]
    with pytest.raises(ValueError, match="cannot start"):
        executor.begin_decodes([TaskKey(K.DECODE, 3)])


def test_a_stopped_step_wakes_who_waits_for_a_task() -> None:
    executor, _, _ = executor_of("rollplex")
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            executor.await_task(TaskKey(K.REWARD, 0))
        except StoppedError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    executor.stop()
    thread.join(10)
    assert len(errors) == 1
