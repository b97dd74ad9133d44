"""Sharded training on four gloo ranks equals training on one; the plan's arithmetic on none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines.spawn import run_ranks

from rollplex_cli.core.errors import UsageError
from rollplex_cli.engines.weights.exchange import plan_transfers
from rollplex_cli.engines.weights.shards import Box
from rollplex_cli.engines.weights.skeleton import build_shards, build_skeleton, parameter_shapes
from rollplex_cli.engines.weights.staged import whole
from rollplex_cli.engines.weights.views import bind_views
from rollplex_cli.plan.weights import KINDS, weight_sharing

WORKER = Path(__file__).with_name("sharded_model.py")
DEGREES = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]


@pytest.mark.scenario
def test_four_ranks_equal_one(tmp_path: Path) -> None:
    """Gradients, twenty updates with exchange and check, and faults on purpose; see sharded_model.py."""
    run_ranks(4, lambda rank: [str(WORKER), str(rank), "4", str(tmp_path / "store")])


@pytest.mark.parametrize(("train_tp", "rollout_tp"), DEGREES)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_shards_cover_every_tensor(tiny: Any, train_tp: int, rollout_tp: int, kv_heads: int) -> None:
    """Primary boxes are a partition of each tensor, and each lies in its rollout tensor where the plan says."""
    config = tiny.config(kv_heads=kv_heads, intermediate=190, tied=False)
    shapes = parameter_shapes(build_skeleton(config, torch.float32))
    counts = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    for shard in range(train_tp):
        _, plan = build_shards(config, torch.float32, train_tp=train_tp, training_shard=shard, rollout_tp=rollout_tp)
        homes = {}
        for name, parts in plan.homes.items():
            pieces = []
            for part in parts:
                index = torch.arange(counts[part.tensor].numel()).view(shapes[part.tensor])[part.box.slices()]
                padding = index.new_full((part.rows - index.shape[0], *index.shape[1:]), -1)
                pieces += [index, padding]
            homes[name] = torch.cat(pieces)
        for placement in plan.placements.values():
            assert placement.full == shapes[placement.tensor]
            if placement.primary:
                counts[placement.tensor][placement.box.slices()] += 1
            expected = torch.arange(counts[placement.tensor].numel()).view(placement.full)[placement.box.slices()]
            assert torch.equal(homes[placement.home][placement.home_box.slices()], expected), placement.name
    assert all((count == 1).all() for count in counts.values())


@pytest.mark.parametrize(("train_tp", "rollout_tp"), DEGREES)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_the_planners_bytes_are_those_of_the_shards(tiny: Any, train_tp: int, rollout_tp: int, kv_heads: int) -> None:
    config = tiny.config(kv_heads=kv_heads, intermediate=190, tied=False)
    module, plan = build_shards(
        config, torch.float32, train_tp=train_tp, training_shard=1 % train_tp, rollout_tp=rollout_tp
    )
    sharing = weight_sharing(plan.shape, train_tp, rollout_tp, 4)
    assert sharing.second_copy_bytes == sum(p.numel() * 4 for p in module.parameters())
    homes = {
        name: torch.zeros(parts[-1].first_row + parts[-1].rows, *parts[0].box.shape[1:])
        for name, parts in plan.homes.items()
    }
    found = bind_views(module, homes, plan).bytes_by_kind()
    assert found == {kind: sharing.bytes_of(kind) for kind in KINDS}
    q = train_tp // rollout_tp
    sent = sum(t.rows * homes[t.home][0].numel() * 4 * (1 - t.sharers / q) for t in plan_transfers(plan))
    assert sharing.received_bytes == sent


def test_nothing_is_exchanged_where_nothing_differs(tiny: Any) -> None:
    def transfers(train_tp: int, rollout_tp: int, kv_heads: int) -> dict[str, str]:
        _, plan = build_shards(tiny.config(kv_heads=kv_heads), torch.float32, train_tp=train_tp, rollout_tp=rollout_tp)
        return {f"{t.home}:{t.first_row}": t.how for t in plan_transfers(plan) if "layers.0.self_attn" in t.home}

    assert transfers(4, 4, 2) == {}
    qkv = "model.layers.0.self_attn.qkv_proj.weight"
    assert set(transfers(2, 1, 2).values()) == {"rows", "columns"}
    assert f"{qkv}:128" in transfers(2, 1, 2)
    assert f"{qkv}:128" not in transfers(2, 1, 1)  # both ranks train the only head
    assert transfers(4, 1, 2)[f"{qkv}:128"] == "shared_rows"


def test_widths_that_do_not_divide_are_refused(tiny: Any) -> None:
    with pytest.raises(UsageError, match=r"`model.visual.blocks.0.attn.qkv.weight` cannot be cut: 64 rows / 3 = 21.33"):
        build_shards(tiny.config(kv_heads=2), torch.float32, train_tp=3)
    with pytest.raises(UsageError, match="cannot be cut"):
        build_shards(tiny.config(intermediate=200), torch.float32, train_tp=16)


def test_boxes() -> None:
    box = Box((2, 0), (3, 4))
    assert box.intersection(Box((4, 2), (9, 9))) == Box((4, 2), (1, 2))
    assert box.intersection(Box((5, 0), (1, 4))) is None
    assert box.contains(Box((3, 1), (1, 1))) and not box.contains(Box((3, 1), (3, 1)))
    assert box.numel == 12 and box.slices((2, 0)) == (slice(0, 3), slice(0, 4))


def test_a_strided_tensor_never_reaches_a_collective() -> None:
    with pytest.raises(AssertionError, match="staged"):
        whole(torch.zeros(4, 6)[:, :3])
