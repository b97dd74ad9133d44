"""Every family: checkpoints in, checkpoints out, random weights, and shards of tensor parallelism."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines.spawn import run_ranks
from safetensors import safe_open

from rollplex_cli.core.errors import UsageError
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.weights.draw import RandomReader
from rollplex_cli.engines.weights.export import save_hf
from rollplex_cli.engines.weights.load import CheckpointReader, fill_homes, fill_parameters
from rollplex_cli.engines.weights.shards import Box
from rollplex_cli.engines.weights.skeleton import (
    build_shards,
    build_skeleton,
    load_config,
    load_model,
    parameter_shapes,
    vision_mlp_width,
)
from rollplex_cli.engines.weights.views import bind_views
from rollplex_cli.plan.families import FAMILIES
from rollplex_cli.plan.weights import weight_sharing

WORKER = Path(__file__).with_name("sharded.py")


def homes_of(plan: Any) -> dict[str, torch.Tensor]:
    return {
        name: torch.full((parts[-1].first_row + parts[-1].rows, *parts[0].box.shape[1:]), float("nan"))
        for name, parts in plan.homes.items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_fills_views_and_copies_alike(checkpoints: dict[str, Path], family: str) -> None:
    folder = checkpoints[family]
    config = load_config(folder)
    reader = CheckpointReader(folder, config, parameter_shapes(build_skeleton(config, torch.float32)))
    original = dict(load_model(folder, torch.float32).named_parameters())
    module, plan = build_shards(config, torch.float32)
    homes = homes_of(plan)
    bind_views(module, homes, plan)
    fill_homes(plan, homes, reader.read)
    copy, _ = build_shards(config, torch.float32)
    fill_parameters(plan, copy, reader.read, "cpu")
    assert not any(home.isnan().any() for home in homes.values())
    for loaded in (module, copy):
        for name, param in loaded.named_parameters():
            stored = original[name]
            assert torch.equal(param[tuple(slice(n) for n in stored.shape)], stored), name
            assert param.detach().sum() == pytest.approx(float(stored.detach().sum()), abs=1e-3), "padding is zero"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_has_the_names_of_the_checkpoint_and_loads_bit_equal(
    checkpoints: dict[str, Path], tmp_path: Path, kit: Any, family: str
) -> None:
    changed = kit.model(family)
    with torch.no_grad():
        for param in changed.parameters():
            param.mul_(0.5)
    save_hf(changed, tmp_path / "out", checkpoints[family])
    loaded = load_model(tmp_path / "out", torch.float32)
    for (name, param), (other, expected) in zip(loaded.named_parameters(), changed.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(param, expected), name
    names = []
    for folder in (tmp_path / "out", checkpoints[family]):
        with safe_open(folder / "model.safetensors", "pt") as file:
            names.append(set(file.keys()))
    assert names[0] == names[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_random_weights_are_the_same_in_every_shard(kit: Any, family: str) -> None:
    config = kit.config(family, tied=False, kv_heads=4)
    shapes = parameter_shapes(build_skeleton(config, torch.float32))

    def read(name: str, box: Box) -> torch.Tensor:
        return RandomReader(3, shapes, vision_mlp_width(config), torch.device("cpu")).read(name, box)

    for train_tp, rollout_tp, shard in ((1, 1, 0), (4, 2, 3)):
        module, plan = build_shards(
            config, torch.float32, train_tp=train_tp, training_shard=shard, rollout_tp=rollout_tp
        )
        homes = homes_of(plan)
        bind_views(module, homes, plan)
        fill_homes(plan, homes, read)
        for name, param in module.named_parameters():
            placement = plan.placements[name]
            whole = read(placement.tensor, Box.whole(shapes[placement.tensor]))
            assert torch.equal(param, whole[placement.box.slices()]), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("train_tp", [1, 2, 4])
def test_the_planners_bytes_are_those_of_the_shards(kit: Any, family: str, train_tp: int) -> None:
    config = kit.config(family, tied=False)
    module, plan = build_shards(config, torch.float32, train_tp=train_tp)
    sharing = weight_sharing(plan.shape, train_tp, 1, 4)
    found = sum(p.numel() * 4 for p in module.parameters())
    # Rank 0 has a whole share of a table that is padded for the ranks; the planner counts the mean.
    table = 49 * 64 * 4 if family == "qwen3_vl" else 0
    assert 0 <= found - sharing.second_copy_bytes <= table * (1 - 1 / train_tp)


@pytest.mark.scenario
def test_sharded_gradients_are_those_of_the_whole_model(tmp_path: Path) -> None:
    run_ranks(4, lambda rank: [str(WORKER), str(rank), "4", str(tmp_path / "store")])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mrope_interleaved": None}, "must have `mrope_interleaved` true in `rope_parameters`, not None"),
        ({"attention_bias": True}, "`attention_bias` is True"),
        ({"deepstack_visual_indexes": [1, 0]}, r"must be ascending blocks of the tower, not \[1, 0\]"),
        ({"num_position_embeddings": 50}, "must be a square: 50"),
    ],
)
def test_variants_of_qwen3_vl_that_are_not_computed_are_refused(kit: Any, change: dict[str, Any], message: str) -> None:
    model = kit.model("qwen3_vl")
    for key, value in change.items():
        for part in (model.config.text_config, model.config.vision_config, model.config.text_config.rope_parameters):
            if isinstance(part, dict) and key in part:
                part[key] = value
            elif hasattr(part, key):
                setattr(part, key, value)
    with pytest.raises(UsageError, match=message):
        model_weights(model)


def test_mixtures_of_experts_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl_moe"}')
    with pytest.raises(UsageError, match="expected `model_type` to be .*`qwen3_vl` in .*: `qwen3_vl_moe`") as caught:
        load_config(tmp_path)
    assert caught.value.hint is not None
    assert "mixtures of experts are not supported" in caught.value.hint
