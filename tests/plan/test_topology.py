from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.core.errors import UsageError
from rollplex_cli.plan.model import load_shape
from rollplex_cli.plan.topology import Topology, build_topology, head_faults, require_replicas_on_one_node

POWERS = [1, 2, 4, 8]


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    rollout = draw(st.sampled_from(POWERS))
    train = rollout * draw(st.sampled_from(POWERS))
    nodes, groups = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from(POWERS))
    return build_topology(nodes, groups * train, train, rollout)


@settings(deadline=None)
@given(topologies())
def test_every_list_of_groups_covers_every_rank_once(topology: Topology) -> None:
    lists = (
        topology.train_tp_groups,
        topology.data_parallel_groups,
        topology.rollout_tp_groups,
        topology.exchange_groups,
    )
    for groups in lists:
        assert sorted(itertools.chain(*groups)) == list(range(topology.num_ranks))
        assert len({len(group) for group in groups}) == 1


@settings(deadline=None)
@given(topologies())
def test_rollout_shard_i_of_replica_b_is_training_shard_qi_plus_b(topology: Topology) -> None:
    q = topology.replicas_per_group
    for place in topology.places:
        assert place.training_shard == q * place.rollout_shard + place.replica
        assert place.rank == place.training_group * topology.train_tp + place.training_shard
        assert 0 <= place.replica < q
        assert 0 <= place.rollout_shard < topology.rollout_tp


@settings(deadline=None)
@given(topologies())
def test_groups_hold_what_their_names_say(topology: Topology) -> None:
    places = topology.places
    for group in topology.rollout_tp_groups:
        members = [places[rank] for rank in group]
        assert len({(m.training_group, m.replica) for m in members}) == 1
        assert [m.rollout_shard for m in members] == list(range(topology.rollout_tp))
    for group in topology.exchange_groups:
        members = [places[rank] for rank in group]
        assert len({(m.training_group, m.rollout_shard) for m in members}) == 1
        assert [m.replica for m in members] == list(range(topology.replicas_per_group))
    for group in topology.data_parallel_groups:
        assert len({places[rank].training_shard for rank in group}) == 1


def test_the_paper_s_topology() -> None:
    topology = build_topology(4, 8, 8, 4)
    assert (topology.num_ranks, topology.data_parallel, topology.replicas_per_group) == (32, 4, 2)
    assert topology.rollout_tp_groups[:2] == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert topology.exchange_groups[:2] == ((0, 1), (2, 3))
    assert topology.data_parallel_groups[0] == (0, 8, 16, 24)
    assert (topology.places[13].node, topology.places[13].local_rank) == (1, 5)


@settings(deadline=None)
@given(topologies())
def test_ranks_with_one_role_are_co_located_ranks_twice(one: Topology) -> None:
    """Rank x trains and rank n / 2 + x decodes what rank x of n / 2 co-located ranks does."""
    apart = build_topology(2 * one.num_nodes, one.ranks_per_node, one.train_tp, one.rollout_tp, disaggregated=True)
    half = one.num_ranks
    assert (apart.num_ranks, apart.data_parallel, apart.replicas_per_group) == (
        2 * half, one.data_parallel, one.replicas_per_group
    )  # fmt: skip
    assert apart.train_tp_groups == one.train_tp_groups
    assert apart.data_parallel_groups == one.data_parallel_groups
    assert apart.rollout_tp_groups == tuple(tuple(half + r for r in ranks) for ranks in one.rollout_tp_groups)
    for x, place in enumerate(one.places):
        trains, decodes = apart.places[x], apart.places[half + x]
        assert (trains.trains, trains.decodes, decodes.trains, decodes.decodes) == (True, False, False, True)
        same = ("training_group", "training_shard", "replica", "rollout_shard")
        for found in (trains, decodes):
            assert [getattr(found, name) for name in same] == [getattr(place, name) for name in same]
    assert sorted(itertools.chain(*apart.team_groups)) == list(range(apart.num_ranks))
    # Every rollout rank gets each training shard in its rollout shard from one rank of its own team.
    for rank in range(half, 2 * half):
        place = apart.places[rank]
        sources = [apart.places[ranks[0]] for ranks in apart.delivery_groups if rank in ranks[1:]]
        q = apart.replicas_per_group
        assert [s.training_shard for s in sources] == [q * place.rollout_shard + b for b in range(q)]
        assert {s.training_group for s in sources} == {place.training_group}


@pytest.mark.parametrize("degrees", [(1, 3, 1, 1), (1, 2, 2, 1), (1, 8, 4, 3)])
def test_halves_that_do_not_divide(degrees: tuple[int, int, int, int]) -> None:
    with pytest.raises(UsageError, match="of them train"):
        build_topology(*degrees, disaggregated=True)


@pytest.mark.parametrize("degrees", [(1, 4, 3, 1), (1, 4, 4, 3), (1, 2, 4, 1)])
def test_degrees_that_do_not_divide(degrees: tuple[int, int, int, int]) -> None:
    with pytest.raises(UsageError, match="degrees do not divide: num_nodes 1 x ranks_per_node"):
        build_topology(*degrees)


def test_heads_that_do_not_divide_are_all_named() -> None:
    shape = load_shape("qwen25vl7b")
    assert head_faults(shape, 4, 2) == []
    assert head_faults(shape, 8, 1) == [
        "qwen25vl7b has 28 attention heads, `topology.train_tp` is 8: 28 / 8 = 3.50 heads a rank"
    ]
    # Sharing one key/value head among ranks is fine, cutting one is not.
    assert head_faults(dataclasses.replace(shape, num_heads=24), 8, 4) == []
    assert len(head_faults(shape, 3, 3)) == 6


def test_a_replica_on_two_nodes_is_named() -> None:
    require_replicas_on_one_node(build_topology(4, 8, 8, 4))
    require_replicas_on_one_node(build_topology(2, 4, 8, 1))
    with pytest.raises(UsageError, match="ranks 0, 2, 4, 6 are on nodes 0, 1 .ranks_per_node 4, train_tp 8"):
        require_replicas_on_one_node(build_topology(2, 4, 8, 4))
