"""The executor under random durations, failures and cancellations: no deadlock, no illegal access, no lost failure."""

from __future__ import annotations

import contextlib
import random
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollplex_cli.core.names import Lane, Phase, TaskKey, TaskKind
from rollplex_cli.memory.leases import ObjectStore
from rollplex_cli.runtime.executor.executor import Executor, StoppedError
from rollplex_cli.runtime.executor.graph import READS_THETA, build_step_graph
from rollplex_cli.runtime.executor.phases import PhaseMachine
from rollplex_cli.runtime.executor.schedules import Schedule, schedule_from
from rollplex_cli.runtime.executor.theta import ThetaGuard

K = TaskKind
LIMIT_S = 20.0


class Step:
    """One step with tasks that sleep, record, lease objects, and perhaps fail."""

    def __init__(
        self,
        schedule: Schedule,
        order: list[int],
        seed: int,
        *,
        reference: bool,
        fail_at: TaskKey | None = None,
        cancel: set[int] | None = None,
    ) -> None:
        self.rng = random.Random(seed)
        self.order, self.fail_at, self.to_cancel = order, fail_at, cancel or set()
        self.machine, self.theta, self.store = PhaseMachine(), ThetaGuard(), ObjectStore()
        self.graph = build_step_graph(sorted(order), reference=reference)
        self.log: list[tuple[TaskKey, Phase, int]] = []
        self.gradients: list[tuple[str, int]] = []
        self.executor = Executor(
            self.graph, schedule, self.machine, self.theta, dict.fromkeys(K, self.body), boundary=self.boundary
        )
        self.executor.on_terminal = self.store.task_ended

    def boundary(self, key: TaskKey, when: str) -> None:
        time.sleep(self.rng.random() * 0.001)

    def body(self, key: TaskKey) -> None:
        if key == self.fail_at:
            raise RuntimeError(f"injected at {key}")
        self.log.append((key, self.machine.state, self.theta.version))
        if key.kind is K.UPDATE:
            with self.theta.write("update"):
                time.sleep(0.001)
        if key.kind is K.ACTOR_PREFIX:
            self.store.put("actor_boundary", object(), key)
        if key.kind in (K.ACTOR_SUFFIX, K.ACTOR_PREFIX_BACKWARD):
            with self.store.lease("actor_boundary", key):
                self.gradients.append((str(key.kind), key.group))
        time.sleep(self.rng.random() * 0.001)

    def decode(self) -> None:
        try:
            keys = [TaskKey(K.DECODE, g) for g in self.order]
            self.executor.begin_decodes(keys)
            for group, key in zip(self.order, keys, strict=True):
                time.sleep(self.rng.random() * 0.002)
                self.executor.touch()
                if key == self.fail_at:
                    raise RuntimeError(f"injected at {key}")
                self.executor.complete_decode(key)
                if group in self.to_cancel:
                    self.executor.cancel_group(group)
            self.executor.run(Lane.ROLLOUT)
        except StoppedError:
            pass
        except RuntimeError as error:
            self.executor.fail(error)

    def lane(self, lane: Lane) -> None:
        with contextlib.suppress(StoppedError, RuntimeError):
            self.executor.run(lane)

    def run(self) -> None:
        threads = [threading.Thread(target=self.decode, daemon=True)]
        threads += [threading.Thread(target=self.lane, args=(x,), daemon=True) for x in (Lane.TRAINER, Lane.HOST)]
        deadline = time.monotonic() + LIMIT_S

        def tick() -> None:
            assert time.monotonic() < deadline, f"deadlock: {self.executor.waiting_for()}"

        self.machine.to(Phase.GENERATE)
        for thread in threads:
            thread.start()
        try:
            for done, then in (
                ([K.DECODE], Phase.LEARN),
                ([K.ACTOR_PREFIX_BACKWARD], Phase.UPDATE),
                ([K.UPDATE], Phase.PUBLISH),
                ([K.PUBLISH], None),
            ):
                self.executor.wait(done, tick, tick_s=0.01)
                if then is not None:
                    self.machine.to(then)
                    self.executor.phase_changed()
        finally:
            for thread in threads:
                thread.join(LIMIT_S)
                assert not thread.is_alive()


SCHEDULES = st.builds(
    schedule_from,
    st.sampled_from(["colocate", "rollplex"]),
    early_groups=st.booleans(),
    prefixes_in_flight=st.integers(0, 3),
)
RELAXED = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


@RELAXED
@given(SCHEDULES, st.permutations(range(4)), st.integers(0, 10**6), st.booleans(), st.sets(st.integers(0, 3)))
def test_a_step_ends_with_everything_in_order(
    schedule: Schedule, order: list[int], seed: int, reference: bool, cancel: set[int]
) -> None:
    step = Step(schedule, list(order), seed, reference=reference, cancel=cancel)
    step.run()
    trained = [g for _, g in step.gradients[::2]]
    assert step.gradients == [(kind, g) for g in trained for kind in ("actor_suffix", "actor_prefix_backward")]
    assert trained == [g for g in order if g in trained]  # logical order, whatever the wall clock did
    assert set(order) - cancel <= set(trained)
    assert {version for key, _, version in step.log if key.kind in READS_THETA} <= {0}
    assert step.theta.version == 1
    assert step.theta.readers == ()
    step.store.end_step()  # raises if an object outlived its last use


@RELAXED
@given(
    SCHEDULES,
    st.permutations(range(4)),
    st.integers(0, 10**6),
    st.sampled_from([k for k in K if k not in (K.EXCHANGE, K.PREFILL, K.ENCODE)]),
    st.integers(0, 3),
)
def test_a_failure_in_any_task_ends_the_step_with_its_reason(
    schedule: Schedule, order: list[int], seed: int, kind: TaskKind, group: int
) -> None:
    fail_at = TaskKey(kind) if kind in (K.UPDATE, K.PUBLISH) else TaskKey(kind, group)
    step = Step(schedule, list(order), seed, reference=True, fail_at=fail_at)
    with pytest.raises(RuntimeError, match=r"injected at"):
        step.run()
    assert str(step.executor.failure) == f"injected at {fail_at}"


@pytest.mark.parametrize("leased_before", [True, False])
def test_a_group_is_cancelled_around_a_task_that_uses_its_objects(leased_before: bool) -> None:
    machine, store, graph = PhaseMachine(), ObjectStore(), build_step_graph([0, 1], reference=False)
    running, cancelled = threading.Event(), threading.Event()
    used: list[object] = []

    def reward(key: TaskKey) -> None:
        if key.group == 0 and not leased_before:
            running.set()
            assert cancelled.wait(LIMIT_S)
        with store.lease("responses", key) as responses:
            if key.group == 0 and leased_before:
                running.set()
                assert cancelled.wait(LIMIT_S)
            used.append(responses)

    schedule = schedule_from("rollplex", early_groups=True, prefixes_in_flight=0)
    executor = Executor(
        graph, schedule, machine, ThetaGuard(), {K.REWARD: reward, K.ADVANTAGE: lambda _key: None}
    )  # fmt: skip
    executor.on_terminal = store.task_ended
    machine.to(Phase.GENERATE)
    keys = [TaskKey(K.DECODE, g) for g in (0, 1)]
    executor.begin_decodes(keys)
    for key in keys:
        store.put("responses", f"of {key.group}", key)
        executor.complete_decode(key)
    host = threading.Thread(target=lambda: executor.run(Lane.HOST), daemon=True)
    host.start()
    assert running.wait(LIMIT_S)
    executor.cancel_group(0)
    cancelled.set()
    host.join(LIMIT_S)
    assert executor.failure is None
    assert not host.is_alive()
    assert used == ["of 0", "of 1"]
    assert store.held() == ["responses[1]"]


def test_a_stop_from_outside_wakes_every_lane() -> None:
    step = Step(schedule_from("rollplex", early_groups=False, prefixes_in_flight=0), [0, 1], 0, reference=True)
    step.machine.to(Phase.GENERATE)
    seen: list[BaseException] = []

    def lane() -> None:
        try:
            step.executor.run(Lane.TRAINER)
        except StoppedError as error:
            seen.append(error)

    thread = threading.Thread(target=lane, daemon=True)
    thread.start()
    time.sleep(0.05)  # the lane has run its prefixes and waits for responses
    step.executor.stop()
    thread.join(LIMIT_S)
    assert len(seen) == 1


def test_waiting_for_names_task_group_and_phase() -> None:
    step = Step(schedule_from("rollplex", early_groups=False, prefixes_in_flight=0), [7], 0, reference=False)
    step.machine.to(Phase.GENERATE)
    step.executor.begin_decodes([TaskKey(K.DECODE, 7)])
    text = "\n".join(step.executor.waiting_for())
    assert "rollout lane: `decode[7]` running for 0 s" in text
    assert "`reward[7]` waits for decode[7]" in text


class RecordingFence:
    """A fence that remembers who waited for it."""

    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1

    def synchronize(self) -> None:
        self.waits += 100


def test_other_lanes_wait_for_the_fence_of_a_task_and_drain_waits_for_all() -> None:
    step = Step(schedule_from("colocate", early_groups=False, prefixes_in_flight=0), [0], 0, reference=False)
    fence, plain = RecordingFence(), step.body

    def body(key: TaskKey) -> RecordingFence | None:
        plain(key)
        return fence if key.kind is K.ADVANTAGE else None

    step.executor = Executor(
        step.graph,
        schedule_from("colocate", early_groups=False, prefixes_in_flight=0),
        step.machine,
        step.theta,
        dict.fromkeys(K, body),
    )
    step.executor.on_terminal = step.store.task_ended
    step.run()
    assert fence.waits == 1  # actor_suffix, on the trainer lane
    step.executor.drain()
    assert fence.waits == 101


def test_reading_while_writing_raises() -> None:
    from rollplex_cli.core.errors import PhaseError

    guard = ThetaGuard()
    refused = pytest.raises(PhaseError, match=r"`update` writes the weights.*`decode\[0\]`")
    with guard.read("decode[0]"), refused, guard.write("update"):
        pass
    with guard.write("update"), pytest.raises(PhaseError, match=r"`decode\[1\]` reads the weights while `update`"):
        guard.begin_read("decode[1]")
    assert guard.version == 1
