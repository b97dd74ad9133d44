"""A checkpoint folder into the views: bit-equal to what other loaders make of it, and everything accounted for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollplex_cli.core.errors import UsageError
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.trainer.split import SplitModel
from rollplex_cli.engines.weights.load import CheckpointReader, fill_homes, fill_parameters
from rollplex_cli.engines.weights.shards import ShardPlan
from rollplex_cli.engines.weights.skeleton import (
    build_shards,
    build_skeleton,
    load_config,
    load_model,
    parameter_shapes,
)
from rollplex_cli.engines.weights.views import bind_views


@pytest.fixture
def saved(tiny: Any, tmp_path: Path) -> Path:
    """A checkpoint in several files, untied, with vision MLPs that need padding."""
    tiny.model(tied=False, intermediate=190).save_pretrained(tmp_path / "m", max_shard_size="1MB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 1
    return tmp_path / "m"


def reader_of(folder: Path) -> CheckpointReader:
    config = load_config(folder)
    return CheckpointReader(folder, config, parameter_shapes(build_skeleton(config, torch.float32)))


def empty_homes(plan: ShardPlan) -> dict[str, torch.Tensor]:
    return {
        name: torch.full((parts[-1].first_row + parts[-1].rows, *parts[0].box.shape[1:]), float("nan"))
        for name, parts in plan.homes.items()
    }


def test_loaded_views_compute_what_the_original_does(tiny: Any, saved: Path) -> None:
    model, plan = build_shards(load_config(saved), torch.float32)
    homes = empty_homes(plan)
    bind_views(model, homes, plan)
    fill_homes(plan, homes, reader_of(saved).read)
    assert not any(home.isnan().any() for home in homes.values())
    original = load_model(saved, torch.float32)
    frozen, _ = build_shards(load_config(saved), torch.float32)
    fill_parameters(plan, frozen, reader_of(saved).read, "cpu")
    prompt, (response,) = tiny.prompt(1, [(2, 4, 8)]), tiny.responses(1, [5])
    with torch.no_grad():
        expected = SplitModel(model_weights(original)).full_logprobs(prompt, response)
        for module in (model, frozen):
            assert (SplitModel(model_weights(module)).full_logprobs(prompt, response) - expected).abs().max() < 1e-5
    for (name, param), other in zip(original.named_parameters(), frozen.parameters(), strict=True):
        cut = other[tuple(slice(0, n) for n in param.shape)]
        assert torch.equal(cut, param), name


@pytest.mark.parametrize("names", ["published", "in memory"])
@pytest.mark.parametrize("tied", [True, False])
def test_names_of_both_generations_and_tied_heads(tiny: Any, tmp_path: Path, names: str, tied: bool) -> None:
    model = tiny.model(tied=tied)
    model.save_pretrained(tmp_path)
    if names == "in memory":
        state = {name: param.detach().clone() for name, param in model.named_parameters()}
        if tied:
            state["lm_head.weight"] = model.lm_head.weight.detach().clone()
        save_file(state, tmp_path / "model.safetensors")
    box = build_shards(model.config, torch.float32)[1].placements["model.visual.blocks.1.attn.proj.weight"].box
    found = reader_of(tmp_path).read("model.visual.blocks.1.attn.proj.weight", box)
    assert torch.equal(found, model.model.visual.blocks[1].attn.proj.weight)


def rewrite(folder: Path, change: Any) -> None:
    """Change the tensors of a checkpoint of several files and write them as one."""
    state: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        state |= load_file(path)
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(state)
    save_file(state, folder / "model.safetensors")


def test_every_name_is_accounted_for(saved: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        del state["model.layers.0.self_attn.o_proj.weight"]
        state["model.layers.9.extra"] = torch.zeros(2)
        state["model.norm.weight"] = torch.zeros(64)

    rewrite(saved, change)
    with pytest.raises(UsageError) as caught:
        reader_of(saved)
    for part in (
        "missing `model.language_model.layers.0.self_attn.o_proj.weight`",
        "unexpected `model.language_model.layers.9.extra`",
        "`model.language_model.norm.weight` has shape [64], expected [128]",
    ):
        assert part in str(caught.value)


def test_a_truncated_file_is_named(saved: Path) -> None:
    path = sorted(saved.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UsageError, match=f"truncated or no safetensors: .*{path.name}"):
        reader_of(saved)
    path.unlink()
    with pytest.raises(UsageError, match=f"the checkpoint has no `{path.name}`"):
        reader_of(saved)


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    with pytest.raises(UsageError, match=r"expected `model_type` to be .*: `qwen2`"):
        load_config(tmp_path)
