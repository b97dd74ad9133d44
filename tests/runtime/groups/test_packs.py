"""Which prompts share a pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex_cli.core.names import TaskKind
from rollplex_cli.runtime.groups.packs import PrefixPacks, packs_of


def prompts(*lengths: int) -> dict[int, Any]:
    return {group: SimpleNamespace(num_tokens=length) for group, length in enumerate(lengths)}


@pytest.mark.parametrize(
    ("lengths", "limit", "alone", "expected"),
    [
        ((10, 10, 10, 10), 20, (), [(0, 1), (2, 3)]),
        ((10, 11, 10, 10), 20, (), [(0,), (1,), (2, 3)]),
        ((10, 10, 10), 0, (), [(0,), (1,), (2,)]),
        ((50, 10, 10), 20, (), [(0,), (1, 2)]),
        ((10, 1, 10, 10), 100, (), [(0,), (1,), (2, 3)]),
        ((10, 10, 10, 10), 100, (1,), [(0,), (1,), (2, 3)]),
        ((), 20, (), []),
    ],
)
def test_packs(lengths: tuple[int, ...], limit: int, alone: tuple[int, ...], expected: list[tuple[int, ...]]) -> None:
    assert packs_of(prompts(*lengths), limit, alone) == expected


@given(st.lists(st.integers(1, 60), max_size=12), st.integers(0, 100), st.sets(st.integers(0, 11)))
def test_every_group_is_in_one_pack_within_the_limit(lengths: list[int], limit: int, alone: set[int]) -> None:
    packs = packs_of(prompts(*lengths), limit, alone)
    assert [group for pack in packs for group in pack] == list(range(len(lengths)))
    for pack in packs:
        if len(pack) > 1:
            assert sum(lengths[group] for group in pack) <= limit
            assert not alone & set(pack)
            assert min(lengths[group] for group in pack) > 1


def test_the_first_of_a_pack_runs_it_for_all() -> None:
    inputs = prompts(5, 5, 5)
    runs: list[list[int]] = []
    packs = PrefixPacks(inputs, 10)

    def run(given: Any) -> Any:
        runs.append([p.num_tokens for p in given])
        return [f"{len(runs)}.{place}" for place in range(len(given))]

    def take(kind: TaskKind, group: int) -> Any:
        return packs.take(kind, group, run)

    assert not packs.waits(TaskKind.ACTOR_PREFIX, 0)
    assert take(TaskKind.ACTOR_PREFIX, 1) == "1.1"
    assert packs.waits(TaskKind.ACTOR_PREFIX, 0) and not packs.waits(TaskKind.ACTOR_PREFIX, 1)
    assert take(TaskKind.REF_PREFIX, 0) == "2.0"  # each role by itself
    assert take(TaskKind.ACTOR_PREFIX, 0) == "1.0"
    assert take(TaskKind.ACTOR_PREFIX, 2) == "3.0"
    assert runs == [[5, 5], [5, 5], [5]]
    assert packs.members(0) == (0, 1) and packs.members(9) == (9,)


def test_a_group_that_comes_later_runs_alone() -> None:
    inputs = prompts(5, 5)
    packs = PrefixPacks(inputs, 100)
    inputs |= {7: SimpleNamespace(num_tokens=3)}
    assert packs.take(TaskKind.REF_PREFIX, 7, lambda given: [p.num_tokens for p in given]) == 3
