"""Objects are used only by their tasks, only while they live."""

from __future__ import annotations

import pytest

from rollplex_cli.core.errors import LeaseError
from rollplex_cli.core.names import TaskKey, TaskKind
from rollplex_cli.memory.leases import ObjectStore
from rollplex_cli.memory.lifetimes import LIFETIMES

K = TaskKind
PREFIX, SUFFIX, BACKWARD = (TaskKey(k, 3) for k in (K.ACTOR_PREFIX, K.ACTOR_SUFFIX, K.ACTOR_PREFIX_BACKWARD))


def test_made_leased_freed() -> None:
    store, value = ObjectStore(), object()
    store.put("actor_boundary", value, PREFIX)
    with store.lease("actor_boundary", SUFFIX) as leased:
        assert leased is value
    assert store.held() == ["actor_boundary[3]"]
    store.task_ended(SUFFIX)
    with store.lease("actor_boundary", BACKWARD):
        pass
    store.task_ended(BACKWARD)
    assert store.held() == []
    freed = pytest.raises(LeaseError, match=r"`actor_prefix_backward\[3\]` asked for .* freed after `actor_prefix_bac")
    with freed, store.lease("actor_boundary", BACKWARD):
        pass


def test_wrong_maker_wrong_user_too_early_twice() -> None:
    store = ObjectStore()
    with pytest.raises(LeaseError, match=r"`actor_suffix\[3\]` cannot make `actor_boundary`"):
        store.put("actor_boundary", 1, SUFFIX)
    with pytest.raises(LeaseError, match="was not made yet by `actor_prefix`"), store.lease("actor_boundary", SUFFIX):
        pass
    useless = pytest.raises(LeaseError, match="has no use of `actor_boundary`")
    with useless as caught, store.lease("actor_boundary", TaskKey(K.REWARD, 3)):
        pass
    assert "actor_prefix_backward, actor_suffix" in (caught.value.hint or "")
    store.put("actor_boundary", 1, PREFIX)
    with pytest.raises(LeaseError, match="exists already"):
        store.put("actor_boundary", 2, PREFIX)


def test_freeing_under_a_lease_raises() -> None:
    store = ObjectStore()
    store.put("actor_boundary", 1, PREFIX)
    with store.lease("actor_boundary", BACKWARD), pytest.raises(LeaseError, match="still leased"):
        store.task_ended(BACKWARD)


def test_an_object_made_after_its_last_use_was_cancelled_is_dropped() -> None:
    store = ObjectStore()
    store.task_ended(BACKWARD)  # cancelled while the prefix was running
    store.put("actor_boundary", 1, PREFIX)
    assert store.held() == []
    store.end_step()


def test_a_leak_is_an_error_and_the_next_step_starts_clean() -> None:
    store = ObjectStore()
    store.put("actor_boundary", 1, PREFIX)
    with pytest.raises(LeaseError, match=r"outlived their step: actor_boundary\[3\]"):
        store.end_step()
    store.put("actor_boundary", 1, PREFIX)


def test_every_row_is_coherent() -> None:
    for row in LIFETIMES.values():
        assert row.users
        if row.last_use is not None:
            assert row.last_use in row.users, row.name
