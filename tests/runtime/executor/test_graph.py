"""The task graph and the schedules, without threads."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.core.names import Lane, Phase, TaskKey, TaskKind
from rollplex_cli.runtime.executor.graph import SharedVision, TaskGraph, TaskState, build_step_graph
from rollplex_cli.runtime.executor.schedules import Schedule, schedule_from

K = TaskKind
GRADIENT = (K.ACTOR_SUFFIX, K.ACTOR_PREFIX_BACKWARD)


def simulate(
    graph: TaskGraph, schedule: Schedule, order: list[int], rng: random.Random, cancel: set[int] = frozenset()
) -> list[TaskKey]:  # type: ignore[assignment]
    """Run a step by chance: at each turn one of the possible events happens. Returns tasks in start order."""
    phase, started, running = Phase.GENERATE, [], []
    for g in order:
        graph.start(TaskKey(K.DECODE, g))
    to_prefill = [g for g in order if TaskKey(K.PREFILL, g) in graph.tasks]
    for g in to_prefill:
        graph.start(TaskKey(K.PREFILL, g))
    to_decode = list(order)
    for g in cancel:
        if g not in order:
            graph.cancel_group(g)
    for _ in range(10_000):
        events = ["decode"] if to_decode and to_decode[0] not in to_prefill else []
        events += ["prefill"] if to_prefill else []
        events += ["finish"] if running else []
        picks = {
            lane: schedule.pick(graph, lane, phase)
            for lane in Lane
            if not any(k.kind in LANE_KINDS[lane] for k in running)
        }
        events += [lane for lane, key in picks.items() if key is not None]
        if not events:
            if phase is Phase.GENERATE and graph.all_terminal([K.DECODE]):
                phase = Phase.LEARN
            elif phase is Phase.LEARN and graph.all_terminal([K.ACTOR_PREFIX_BACKWARD]):
                phase = Phase.UPDATE
            elif phase is Phase.UPDATE and graph.all_terminal([K.UPDATE]):
                phase = Phase.PUBLISH
            else:
                break
            continue
        event = rng.choice(events)
        if event == "decode":
            graph.complete(TaskKey(K.DECODE, to_decode.pop(0)))
        elif event == "prefill":
            graph.complete(TaskKey(K.PREFILL, to_prefill.pop(rng.randrange(len(to_prefill)))))
        elif event == "finish":
            graph.complete(running.pop(rng.randrange(len(running))))
        else:
            key = picks[Lane(event)]
            assert key is not None
            graph.start(key)
            started.append((key, phase))
            running.append(key)
    assert graph.all_terminal(K), [
        t.key for t in graph.tasks.values() if t.state not in (TaskState.DONE, TaskState.CANCELLED)
    ]
    return started  # type: ignore[return-value]


LANE_KINDS = {
    Lane.ROLLOUT: {K.PUBLISH},
    Lane.HOST: {K.REWARD, K.ADVANTAGE},
    Lane.TRAINER: {
        K.EXCHANGE,
        K.ENCODE,
        K.REF_PREFIX,
        K.REF_SUFFIX,
        K.ACTOR_PREFIX,
        K.ACTOR_SUFFIX,
        K.ACTOR_PREFIX_BACKWARD,
        K.UPDATE,
    },
}


def shared(groups: set[int], *, from_rollout: bool, for_reference: bool) -> SharedVision:
    return SharedVision(groups=frozenset(groups), from_rollout=from_rollout, for_reference=for_reference)


schedules = st.builds(
    schedule_from,
    st.sampled_from(["colocate", "rollplex"]),
    early_groups=st.booleans(),
    prefixes_in_flight=st.integers(0, 4),
)


@settings(max_examples=200, deadline=None)
@given(
    schedules,
    st.permutations(range(5)),
    st.booleans(),
    st.booleans(),
    st.integers(0, 10**6),
    st.sets(st.integers(0, 4), max_size=4),
    st.none() | st.builds(shared, st.sets(st.integers(0, 4)), from_rollout=st.booleans(), for_reference=st.booleans()),
)
def test_every_schedule_ends_and_adds_gradients_in_logical_order(
    schedule: Schedule,
    order: list[int],
    reference: bool,
    exchange: bool,
    seed: int,
    dropped: set[int],
    vision: SharedVision | None,
) -> None:
    graph = build_step_graph(range(5), reference=reference, exchange=exchange, vision=vision)
    kept = [g for g in order if g not in dropped]
    started = simulate(graph, schedule, kept, random.Random(seed), cancel=dropped)
    gradients = [(k.kind, k.group) for k, _ in started if k.kind in GRADIENT]
    assert gradients == [(kind, g) for g in kept for kind in GRADIENT]
    place = {key: index for index, (key, _) in enumerate(started)}
    for g in set(kept) & (vision.groups if vision is not None else frozenset()):
        users = [K.ACTOR_PREFIX, *([K.REF_PREFIX] if reference and vision is not None and vision.for_reference else [])]
        assert all(place[TaskKey(K.ENCODE, g)] < place[TaskKey(kind, g)] for kind in users)


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(5)), st.integers(1, 3), st.integers(0, 10**6))
def test_boundaries_held_stay_within_the_limit_plus_the_next_group(order: list[int], limit: int, seed: int) -> None:
    graph = build_step_graph(range(5), reference=True)
    schedule = schedule_from("rollplex", early_groups=True, prefixes_in_flight=limit)
    started = simulate(graph, schedule, list(order), random.Random(seed))
    held, most = 0, 0
    for key, _ in started:
        held += (key.kind is K.ACTOR_PREFIX) - (key.kind is K.ACTOR_PREFIX_BACKWARD)
        most = max(most, held)
    assert most <= limit + 1


def test_colocate_runs_role_by_role_after_decode() -> None:
    graph = build_step_graph(range(3), reference=True)
    started = simulate(
        graph, schedule_from("colocate", early_groups=True, prefixes_in_flight=0), [2, 0, 1], random.Random(0)
    )
    trainer = [(k, p) for k, p in started if k.kind in LANE_KINDS[Lane.TRAINER]]
    assert all(p is not Phase.GENERATE for _, p in trainer)
    kinds = [k.kind for k, _ in trainer]
    last_reference = max(i for i, kind in enumerate(kinds) if kind in (K.REF_PREFIX, K.REF_SUFFIX))
    assert kinds.index(K.ACTOR_PREFIX) > last_reference


@settings(max_examples=60, deadline=None)
@given(st.permutations(range(5)), st.booleans(), st.integers(0, 10**6))
def test_colocate_holds_one_group_of_the_actor_however_late_its_advantages(
    order: list[int], reference: bool, seed: int
) -> None:
    vision = shared({0, 1, 2, 4}, from_rollout=False, for_reference=False)
    graph = build_step_graph(range(5), reference=reference, vision=vision)
    schedule = schedule_from("colocate", early_groups=False, prefixes_in_flight=0, advantages_wait=True)
    keys = [key for key, _ in simulate(graph, schedule, list(order), random.Random(seed))]
    boundaries = [key.kind for key in keys if key.kind in (K.ACTOR_PREFIX, K.ACTOR_PREFIX_BACKWARD)]
    assert boundaries == [K.ACTOR_PREFIX, K.ACTOR_PREFIX_BACKWARD] * 5
    if not reference:
        features = [key for key in keys if key.kind in (K.ENCODE, K.ACTOR_PREFIX_BACKWARD) and key.group != 3]
        assert [key.kind for key in features] == [K.ENCODE, K.ACTOR_PREFIX_BACKWARD] * 4


def test_vision_features_come_right_before_their_first_user() -> None:
    """So that no more of them are held than the order of the roles asks for."""
    vision = shared({0, 1, 2}, from_rollout=False, for_reference=True)
    graph = build_step_graph(range(3), reference=True, vision=vision)
    schedule = schedule_from("colocate", early_groups=False, prefixes_in_flight=0)
    keys = [key for key, _ in simulate(graph, schedule, [2, 0, 1], random.Random(0))]
    for g in range(3):
        trainer = [key for key in keys if key.kind in LANE_KINDS[Lane.TRAINER]]
        assert trainer.index(TaskKey(K.REF_PREFIX, g)) == trainer.index(TaskKey(K.ENCODE, g)) + 1


def test_a_prefill_that_runs_can_be_left() -> None:
    graph = build_step_graph([0], reference=False, vision=shared({0}, from_rollout=True, for_reference=False))
    prefill, encode = TaskKey(K.PREFILL, 0), TaskKey(K.ENCODE, 0)
    graph.start(prefill)
    assert graph.blocked_by(encode) == ["prefill[0]"] and not graph.is_ready(encode)
    graph.leave_decode(prefill)
    assert graph.state(prefill) is TaskState.CANCELLED
    with pytest.raises(ValueError, match="cannot be left"):
        graph.leave_decode(prefill)


def test_a_rank_that_only_decodes_has_nothing_of_the_training() -> None:
    graph = build_step_graph(range(3), reference=True, exchange=True, trains=False)
    assert {key.kind for key in graph.tasks} == {K.DECODE, K.EXCHANGE, K.PUBLISH}
    started = simulate(
        graph, schedule_from("disagg", early_groups=True, prefixes_in_flight=0), [2, 0, 1], random.Random(0)
    )
    assert started[-1] == (TaskKey(K.PUBLISH), Phase.PUBLISH)  # after every hand-over, and no update to wait for
    assert sum(key.kind is K.EXCHANGE for key, _ in started) == 3


def test_without_early_groups_suffixes_wait_for_the_barrier() -> None:
    graph = build_step_graph(range(3), reference=True)
    started = simulate(
        graph, schedule_from("rollplex", early_groups=False, prefixes_in_flight=0), [2, 0, 1], random.Random(1)
    )
    assert all(p is Phase.LEARN for k, p in started if k.kind in (*GRADIENT, K.REF_SUFFIX))
    assert any(p is Phase.GENERATE for k, p in started if k.kind is K.ACTOR_PREFIX)


@pytest.mark.parametrize("limit", [0, 1, 2])
def test_after_decode_the_reference_is_done_before_the_actor_trains(limit: int) -> None:
    graph = build_step_graph(range(4), reference=True)
    schedule = schedule_from("rollplex", early_groups=False, prefixes_in_flight=limit)
    kinds = [
        key.kind for key, phase in simulate(graph, schedule, [2, 0, 3, 1], random.Random(2)) if phase is Phase.LEARN
    ]
    last_reference = max(i for i, kind in enumerate(kinds) if kind is K.REF_SUFFIX)
    assert kinds.count(K.REF_SUFFIX) == 4
    assert min(kinds.index(kind) for kind in GRADIENT) > last_reference


def test_no_suffix_before_its_needs() -> None:
    graph = build_step_graph([0], reference=True)
    graph.start(TaskKey(K.DECODE, 0))
    graph.complete(TaskKey(K.DECODE, 0))
    suffix = TaskKey(K.ACTOR_SUFFIX, 0)
    assert not graph.is_ready(suffix)
    assert graph.blocked_by(suffix) == ["actor_prefix[0]", "advantage[0]", "ref_suffix[0]"]
    with pytest.raises(ValueError, match="cannot start"):
        graph.start(suffix)


def test_a_group_in_the_middle_of_its_gradient_is_not_cancelled() -> None:
    graph = build_step_graph([0, 1], reference=False)
    for g in (0, 1):
        for kind in (K.DECODE, K.REWARD, K.ADVANTAGE, K.ACTOR_PREFIX):
            graph.start(TaskKey(kind, g))
            graph.complete(TaskKey(kind, g))
    graph.start(TaskKey(K.ACTOR_SUFFIX, 0))
    assert graph.cancel_group(0) == []
    assert TaskKey(K.ACTOR_SUFFIX, 1) in graph.cancel_group(1)
    assert graph.state(TaskKey(K.ACTOR_PREFIX_BACKWARD, 0)) is TaskState.WAITING


def test_unknown_needs_and_doubles_are_refused() -> None:
    graph = TaskGraph()
    graph.add(TaskKey(K.UPDATE))
    with pytest.raises(ValueError, match="in the graph already"):
        graph.add(TaskKey(K.UPDATE))
    with pytest.raises(ValueError, match="not in the graph"):
        graph.add(TaskKey(K.PUBLISH), [TaskKey(K.DECODE, 3)])
