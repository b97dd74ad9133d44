"""Random weights of a model that lies on no disk: the same under any degrees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rollplex_cli.engines.weights.draw import RandomReader, mark_random, random_seed_of
from rollplex_cli.engines.weights.load import fill_homes
from rollplex_cli.engines.weights.shards import Box
from rollplex_cli.engines.weights.skeleton import build_shards, build_skeleton, parameter_shapes


def test_every_shard_is_a_box_of_the_same_model(tiny: Any) -> None:
    config = tiny.config(intermediate=190)
    shapes = parameter_shapes(build_skeleton(config, torch.float32))
    whole = {name: reader(config, shapes).read(name, Box.whole(shape)) for name, shape in shapes.items()}
    for train_tp, rollout_tp, shard in ((1, 1, 0), (4, 2, 3)):
        _, plan = build_shards(config, torch.float32, train_tp=train_tp, training_shard=shard, rollout_tp=rollout_tp)
        homes = {
            name: torch.full((parts[-1].first_row + parts[-1].rows, *parts[0].box.shape[1:]), float("nan"))
            for name, parts in plan.homes.items()
        }
        fill_homes(plan, homes, reader(config, shapes).read)
        for placement in plan.placements.values():
            found = homes[placement.home][placement.home_box.slices()]
            assert torch.equal(found, whole[placement.tensor][placement.box.slices()]), placement.name
    gate = whole["model.visual.blocks.0.mlp.gate_proj.weight"]
    down = whole["model.visual.blocks.0.mlp.down_proj.weight"]
    assert not gate[190:].any() and not down[:, 190:].any() and gate[:190].all()
    assert (whole["model.language_model.norm.weight"] == 1).all()
    assert not whole["model.language_model.layers.0.self_attn.q_proj.bias"].any()
    embedding = whole["model.language_model.embed_tokens.weight"]
    assert abs(float(embedding.std()) - 0.02) < 0.001
    other = reader(config, shapes, seed=6).read("model.language_model.embed_tokens.weight", Box.whole((448, 128)))
    assert not torch.equal(embedding, other)


def reader(config: Any, shapes: Any, seed: int = 5) -> RandomReader:
    return RandomReader(seed, shapes, config.vision_config.intermediate_size, torch.device("cpu"))


def test_a_folder_is_marked(tmp_path: Path) -> None:
    assert random_seed_of(tmp_path) is None
    mark_random(tmp_path, 12)
    assert random_seed_of(tmp_path) == 12
