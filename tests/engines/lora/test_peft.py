"""An adapter folder says what PEFT needs to apply it, and merging gives the model that it describes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rollplex_cli.core.errors import UsageError
from rollplex_cli.engines.lora import peft
from rollplex_cli.engines.lora.adapters import AdaptedReader, LoraSettings, adapted_modules, attach_adapters
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.trainer.split import SplitModel
from rollplex_cli.engines.weights.names import is_adapter
from rollplex_cli.engines.weights.shards import Box
from rollplex_cli.engines.weights.skeleton import build_shards

LORA = LoraSettings(rank=3, alpha=12.0, targets=("q_proj", "o_proj", "up_proj"))


def factors_of(model: Any) -> dict[str, torch.Tensor]:
    """Random factors by name, by what a module with adapters asks for."""
    attach_adapters(model, LORA)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if is_adapter(name):
                param.copy_(torch.randn(param.shape, generator=generator) * 0.2)
    return {name: p.detach().clone() for name, p in model.named_parameters() if is_adapter(name)}


def test_the_folder_describes_the_adapted_model(tiny: Any, tmp_path: Path) -> None:
    """Applied by the rules of PEFT's documentation: modules by name, scale alpha / r, tensors under its prefix."""
    adapted = tiny.model()
    factors = factors_of(adapted)
    peft.save_adapter(factors, LORA, "/models/base", tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and config["base_model_name_or_path"] == "/models/base"
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    plain = tiny.model()
    modules = dict(plain.named_modules())
    chosen = [name for name in modules if name in config["target_modules"]]
    assert len(chosen) == 2 * 3 and not any("visual" in name for name in chosen)
    with torch.no_grad():
        for name in chosen:
            a, b = (stored.pop(f"base_model.model.{name}.lora_{x}.weight") for x in "AB")
            assert a.shape[0] == b.shape[1] == config["r"]
            modules[name].weight += config["lora_alpha"] / config["r"] * b @ a
    assert not stored  # every tensor belongs to a module
    prompt, (response,) = tiny.prompt(2, [(1, 4, 4)]), tiny.responses(2, [5])
    with torch.no_grad():
        ours = SplitModel(model_weights(adapted, lora=LORA)).full_logprobs(prompt, response)
        theirs = SplitModel(model_weights(plain)).full_logprobs(prompt, response)
    assert (ours - theirs).abs().max() < 1e-5
    merged = tiny.model()
    peft.merge(merged, LORA, factors)
    for (name, param), expected in zip(merged.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(param, expected, atol=1e-6), name
    assert not torch.equal(merged.model.language_model.layers[0].self_attn.q_proj.weight,
                           tiny.model().model.language_model.layers[0].self_attn.q_proj.weight)  # fmt: skip
    with pytest.raises(UsageError, match="exists already"):
        peft.save_adapter(factors, LORA, "", tmp_path / "adapter")
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]


@pytest.mark.parametrize("train_tp", [1, 2])
def test_first_values_are_the_base_and_know_no_layout(tiny: Any, train_tp: int) -> None:
    """B is zero, A as wide as its input allows, and a rank's part is cut from the same tensor."""
    config = tiny.config()
    model, plan = build_shards(config, torch.float32, train_tp=train_tp, training_shard=train_tp - 1, lora=LORA)
    assert {n for n, _ in model.named_parameters()} == set(plan.placements)
    assert {n.rsplit(".lora_", 1)[0] for n in plan.placements if is_adapter(n)} == set(adapted_modules(model, LORA))
    whole = AdaptedReader(lambda *_: torch.empty(0), build_shards(config, torch.float32, lora=LORA)[1], seed=3)
    read = AdaptedReader(lambda _name, box: torch.full(box.shape, 7.0), plan, seed=3).read
    for name, placement in plan.placements.items():
        value = read(name, placement.box)
        if not is_adapter(name):
            assert (value == 7.0).all()
        elif ".lora_B." in name:
            assert not value.any()
        else:
            bound = placement.full[1] ** -0.5
            assert 0.5 * bound < value.abs().max() <= bound
            expected = whole.read(name, Box.whole(placement.full))[placement.box.slices()]
            assert torch.equal(value, expected), name
    adapters = sum(plan.placements[name].box.numel for name in plan.placements if is_adapter(name))
    assert adapters == plan.shape.adapter_parameters(LORA.rank, LORA.targets, train_tp)
    drawn = [name for name in plan.placements if re.search(r"lora_A", name)]
    first, second = (read(name, Box((0, 0), (3, 8))) for name in drawn[:2])
    assert not torch.equal(first, second)
