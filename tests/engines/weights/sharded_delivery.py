"""What a rank of `sharded_model.py` checks of weights that are sent from ranks that train to ranks that decode."""

from __future__ import annotations

import conftest as tiny
import pytest
import torch
import torch.distributed as dist
from sharded_model import boxed, empty_homes

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.engines.weights.check import check_published
from rollplex_cli.engines.weights.delivery import Delivery
from rollplex_cli.engines.weights.load import fill_homes
from rollplex_cli.engines.weights.skeleton import build_shards
from rollplex_cli.plan.topology import build_topology


def deliveries(rank: int) -> None:
    """Training ranks 0 and 1, rollout ranks 2 and 3: after a delivery these decode with what those trained, whatever
    they had before, and a byte that did not arrive fails the check on every rank."""
    trained = tiny.tiny_model(seed=1, kv_heads=2, tied=False)
    before = tiny.tiny_model(seed=2, kv_heads=2, tied=False)
    for train_tp, rollout_tp in ((1, 1), (2, 1), (2, 2)):
        topology = build_topology(1, 4, train_tp, rollout_tp, disaggregated=True)
        place, q = topology.places[rank], topology.replicas_per_group
        shards, degree = [place.training_shard], train_tp
        if place.decodes:
            shards, degree = list(range(q * place.rollout_shard, q * (place.rollout_shard + 1))), rollout_tp
        degrees = {"train_tp": train_tp, "rollout_tp": degree}
        plans = [build_shards(trained.config, trained.dtype, training_shard=s, **degrees)[1] for s in shards]
        homes, expected = (empty_homes(plans[0], trained.dtype) for _ in range(2))
        for target, model in ((homes, before if place.decodes else trained), (expected, trained)):
            values = {name: param.detach() for name, param in model.named_parameters()}
            fill_homes(plans[0], target, lambda name, box, values=values: boxed(values[name], box))  # type: ignore[misc]
        made = [(ranks, dist.new_group(list(ranks))) for ranks in topology.delivery_groups]
        delivery = Delivery(plans, homes, [group for ranks, group in made if rank in ranks], sends=place.trains)
        delivery.run()
        assert all(torch.equal(home, expected[name]) for name, home in homes.items()), (train_tp, rollout_tp)
        check_published(plans, homes, None, None)
        if rank == 3:
            homes["model.layers.0.mlp.down_proj.weight"][0, -1] += 1
        with pytest.raises(RunFailedError, match="differ in trained part"):
            check_published(plans, homes, None, None)
