"""Objects have memory for the tasks that use them. Numbers are the invariants of memory/DESIGN.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rollplex_cli.core.errors import DoesNotFitError, LeaseError, RunFailedError
from rollplex_cli.core.names import TaskKey, TaskKind
from rollplex_cli.core.units import MIB
from rollplex_cli.memory.manager import MemoryManager
from rollplex_cli.memory.regions import Content, RegionState
from rollplex_cli.memory.residency import DECODES, Policy, Residency
from rollplex_cli.memory.vmm.base import OutOfMemoryError

K = TaskKind
GROUPS = (0, 1)
STEP = [TaskKey(kind, g) for g in GROUPS for kind in (K.DECODE, K.REF_PREFIX, K.REF_SUFFIX, K.ACTOR_SUFFIX)]
STEP += [TaskKey(K.ACTOR_PREFIX_BACKWARD, g) for g in GROUPS] + [TaskKey(K.UPDATE)]
FLOATS = {"flat": ((MIB,), torch.float32)}
"""4 MiB."""


@pytest.fixture
def residency(driver: Any) -> Iterator[Residency]:
    made = Residency(
        MemoryManager(driver, budget_bytes=10 * MIB, host_budget_bytes=8 * MIB), where=lambda: "step 3, phase LEARN"
    )
    yield made
    made.close()


def mapped(residency: Residency) -> list[str]:
    return sorted(residency.manager.usage().regions)


def test_an_object_has_memory_from_its_first_to_its_last_user(residency: Residency) -> None:  # S1
    gradients = residency.place("gradients", FLOATS, content=Content.ZEROED)["flat"]
    address = gradients.data_ptr()
    residency.rest("gradients")
    residency.expect(STEP)
    assert mapped(residency) == []
    for key in STEP[3::4]:  # the suffixes
        with residency.lease("gradients", key) as region:
            assert region.tensor("flat").data_ptr() == address
            gradients.add_(1)
        residency.task_ended(key)
        residency.release_due()
    assert float(gradients.sum()) == 2 * MIB
    for key in STEP[-3:]:
        with residency.lease("gradients", key):
            pass
        assert mapped(residency) == ["gradients"]
        residency.task_ended(key)
    residency.release_due()
    assert mapped(residency) == []
    residency.expect(STEP)
    with residency.lease("gradients", STEP[3]):
        assert float(gradients.abs().sum()) == 0  # as declared: a new lifetime begins with zeros


def test_a_constant_object_comes_back_as_it_was(residency: Residency) -> None:
    weights = residency.place("reference_weights", FLOATS, content=Content.CONSTANT)["flat"]
    weights.copy_(torch.arange(MIB, dtype=torch.float32))
    residency.rest("reference_weights")
    residency.expect(STEP)
    with residency.lease("reference_weights", TaskKey(K.REF_PREFIX, 0)):
        assert torch.equal(weights.cpu(), torch.arange(MIB, dtype=torch.float32))


def test_a_lease_outside_of_the_lifetime_names_object_task_phase_and_place(residency: Residency) -> None:  # S2
    residency.place("reference_weights", FLOATS, content=Content.CONSTANT)
    residency.expect(STEP)
    for key in STEP:
        residency.task_ended(key)
    residency.release_due()
    late = TaskKey(K.REF_SUFFIX, 1)
    said = (
        r"`ref_suffix\[1\]` asked for `reference_weights` \(step 3, phase LEARN\), whose lifetime ended after "
        r"`ref_suffix\[1\]` \(step 3, phase LEARN\)"
    )
    with pytest.raises(LeaseError, match=said), residency.lease("reference_weights", late):
        pass
    with (
        pytest.raises(LeaseError, match=r"`reward\[0\]` has no use of `reference_weights` \(step 3"),
        residency.lease("reference_weights", TaskKey(K.REWARD, 0)),
    ):
        pass


def test_lifetimes_are_the_same_where_everything_stays_mapped(driver: Any) -> None:
    residency = Residency(MemoryManager(driver, budget_bytes=8 * MIB, host_budget_bytes=0), Policy.RESIDENT)
    residency.place("gradients", FLOATS)
    residency.rest("gradients")
    residency.expect(STEP)
    for key in STEP:
        residency.task_ended(key)
    residency.release_due()
    assert mapped(residency) == ["gradients"]
    with pytest.raises(LeaseError, match="lifetime ended"), residency.lease("gradients", TaskKey(K.UPDATE)):
        pass
    residency.close()


def test_what_is_kept_has_memory_until_it_is_not_kept_any_more(residency: Residency) -> None:
    for name in ("rollout_kv", "gradients"):
        residency.place(name, FLOATS)
        residency.rest(name)

    def step() -> list[str]:
        residency.expect(STEP)
        with residency.lease("rollout_kv", DECODES):
            pass
        residency.end("rollout_kv", DECODES)
        with residency.lease("gradients", STEP[3]):
            return mapped(residency)

    residency.keep(["rollout_kv", "snapshot"])  # of which one is not placed
    assert mapped(residency) == ["rollout_kv"]
    assert step() == ["gradients", "rollout_kv"]
    with pytest.raises(LeaseError, match="lifetime ended"), residency.lease("rollout_kv", DECODES):
        pass
    for key in STEP:
        residency.task_ended(key)
    residency.release_due()
    assert mapped(residency) == ["rollout_kv"]
    residency.keep([])
    assert mapped(residency) == []
    assert step() == ["gradients"]


def test_kept_rows_are_not_punched(residency: Residency) -> None:
    weights = residency.place("snapshot", FLOATS, stays=True, may_go={"flat": [(0, 2 * MIB)]})["flat"]
    residency.keep(["snapshot"])
    residency.punch("snapshot", DECODES)
    assert not residency.manager.get("snapshot").punched
    weights.fill_(1.0)
    residency.fill("snapshot")
    assert float(weights.min()) == 1.0
    residency.keep([])
    residency.punch("snapshot", DECODES)
    assert residency.manager.get("snapshot").punched


def test_a_cancelled_task_is_no_reason_to_keep_an_object(residency: Residency) -> None:
    residency.place("reference_weights", FLOATS, content=Content.CONSTANT)
    residency.expect(STEP)
    reference = [key for key in STEP if key.kind in (K.REF_PREFIX, K.REF_SUFFIX)]
    with residency.lease("reference_weights", reference[0]):
        for key in reference:  # the others were cancelled meanwhile
            residency.task_ended(key)
        with pytest.raises(LeaseError, match="still leased"):
            residency.release_due()
        assert mapped(residency) == ["reference_weights"]


def test_the_end_of_decode_does_not_wait_for_its_tasks_to_be_reported(residency: Residency) -> None:
    residency.place("rollout_kv", FLOATS)
    residency.rest("rollout_kv")
    residency.expect(STEP)
    with residency.lease("rollout_kv", DECODES):
        assert mapped(residency) == ["rollout_kv"]
    residency.end("rollout_kv", DECODES)
    assert mapped(residency) == []
    with pytest.raises(LeaseError, match="ended after `decode`"), residency.lease("rollout_kv", DECODES):
        pass
    with residency.hold("rollout_kv", "evaluation"):
        assert mapped(residency) == ["rollout_kv"]
    assert mapped(residency) == []


def test_objects_share_a_budget_that_both_at_once_would_exceed(residency: Residency) -> None:  # S3
    for name in ("rollout_kv", "gradients"):
        residency.place(name, {"flat": ((3 * MIB // 2,), torch.float32)})
        residency.rest(name)
    residency.expect(STEP)
    with residency.lease("rollout_kv", DECODES):
        wanted = r"`gradients` within `memory.budget_gib` wants 6.0 MiB and 4.0 MiB are free; held by `rollout_kv` 6.0"
        with pytest.raises(OutOfMemoryError, match=wanted), residency.lease("gradients", STEP[3]):
            pass
        assert mapped(residency) == ["rollout_kv"]
    residency.end("rollout_kv", DECODES)
    with residency.lease("gradients", STEP[3]):
        assert mapped(residency) == ["gradients"]


def test_no_room_to_place_leaves_nothing(residency: Residency) -> None:
    residency.place("rollout_kv", {"flat": ((2 * MIB,), torch.float32)})
    with pytest.raises(OutOfMemoryError):
        residency.place("gradients", FLOATS)
    assert mapped(residency) == ["rollout_kv"]
    residency.rest("rollout_kv")
    residency.place("gradients", FLOATS)  # the name is free again


def test_no_host_memory_for_what_must_be_kept(driver: Any) -> None:
    residency = Residency(MemoryManager(driver, budget_bytes=8 * MIB, host_budget_bytes=MIB))
    residency.place("reference_weights", FLOATS, content=Content.CONSTANT)
    with pytest.raises(OutOfMemoryError, match="`reference_weights \\(saved\\)` on the host wants 4.0 MiB") as caught:
        residency.rest("reference_weights")
    assert caught.value.exit_code == 3
    assert "memory.host_budget_gib" in (caught.value.hint or "")
    assert residency.manager.get("reference_weights").state is RegionState.MAPPED
    residency.close()


def test_bodies_hold_what_their_kind_uses(residency: Residency) -> None:
    for name in ("gradients", "reference_weights"):
        residency.place(name, {"flat": ((MIB // 2,), torch.float32)}, content=Content.CONSTANT)
        residency.rest(name)
    seen: dict[TaskKind, list[str]] = {}

    def body(key: TaskKey) -> None:
        seen[key.kind] = mapped(residency)

    residency.expect(STEP)
    bodies = residency.around(dict.fromkeys((K.REF_PREFIX, K.REWARD, K.UPDATE), body))
    bodies[K.REWARD](TaskKey(K.REWARD, 0))
    bodies[K.REF_PREFIX](TaskKey(K.REF_PREFIX, 0))
    bodies[K.UPDATE](TaskKey(K.UPDATE))
    assert seen == {
        K.REWARD: [],
        K.REF_PREFIX: ["reference_weights"],
        K.UPDATE: ["gradients", "reference_weights"],  # the latter until all its users are done
    }


def test_errors_of_pytorch_about_memory_name_what_is_known(residency: Residency) -> None:
    residency.place("rollout_kv", FLOATS)

    def full(_key: TaskKey) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total of")

    with pytest.raises(DoesNotFitError, match=r"for `ref_prefix\[0\]` \(step 3.*`rollout_kv` 4.0 MiB") as caught:
        residency.around({K.REF_PREFIX: full})[K.REF_PREFIX](TaskKey(K.REF_PREFIX, 0))
    assert caught.value.exit_code == 3

    def illegal(_key: TaskKey) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    residency.rest("rollout_kv")
    with pytest.raises(RunFailedError, match="not mapped now: `rollout_kv`, unmapped after its construction"):
        residency.around({K.REWARD: illegal})[K.REWARD](TaskKey(K.REWARD, 0))


def test_steps_leave_nothing_behind(residency: Residency) -> None:  # S5
    residency.place("gradients", FLOATS)
    residency.place("reference_weights", {"flat": ((MIB // 2,), torch.float32)}, content=Content.CONSTANT)
    residency.rest("gradients")
    residency.rest("reference_weights")
    bodies = residency.around(dict.fromkeys({key.kind for key in STEP}, lambda _key: None))
    ends = []
    for _ in range(3):
        residency.expect(STEP)
        for key in STEP:
            if key.kind is not K.DECODE:
                bodies[key.kind](key)
            residency.task_ended(key)
            residency.release_due()
        residency.manager.check()
        ends.append((residency.manager.usage().used_bytes, residency.manager.host.held_bytes))
    assert ends == [(0, 2 * MIB)] * 3
