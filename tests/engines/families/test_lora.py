"""Adapters on the families besides Qwen2.5-VL: both engines sample and train the model that they would merge to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from rollplex_cli.engines.lora.adapters import AdaptedReader, LoraSettings, attach_adapters
from rollplex_cli.engines.rollout.args import RolloutOptions
from rollplex_cli.engines.rollout.base import GroupRequest, SamplingSettings
from rollplex_cli.engines.rollout.engine import SglangRollout
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.trainer.split import SplitModel
from rollplex_cli.engines.weights.load import CheckpointReader, fill_homes
from rollplex_cli.engines.weights.names import ADAPTED_MODULES, is_adapter
from rollplex_cli.engines.weights.skeleton import build_shards, build_skeleton, load_config, parameter_shapes
from rollplex_cli.engines.weights.views import bind_views
from rollplex_cli.rl.packing import pack_suffix

if TYPE_CHECKING:
    from pathlib import Path

FAMILIES = ("qwen2_vl", "qwen3_vl")
LORA = LoraSettings(rank=3, alpha=6.0, targets=tuple(ADAPTED_MODULES))
MEDIA: dict[str, Any] = {"images": [(4, 6)], "videos": [(2, 4, 8)]}


@torch.no_grad()
def disturb(model: Any) -> None:
    """Adapters far from zero, and the only parameters with gradients."""
    generator = torch.Generator().manual_seed(7)
    for name, param in model.named_parameters():
        param.requires_grad_(is_adapter(name))
        if is_adapter(name):
            param.copy_(torch.randn(param.shape, generator=generator) * 0.15)


@torch.no_grad()
def merged(plain: Any, model: Any) -> Any:
    """`plain` with W + scale B A."""
    factors = dict(model.named_parameters())
    for name, param in plain.named_parameters():
        stem = name.removesuffix(".weight")
        if f"{stem}.lora_A.weight" in factors:
            param += LORA.scale * factors[f"{stem}.lora_B.weight"] @ factors[f"{stem}.lora_A.weight"]
    return plain


def trained(model: Any, prompt: Any, responses: list[list[int]], **options: Any) -> torch.Tensor:
    """Log-probs of packed responses, with gradients of a weighted sum of them left in the parameters."""
    split = SplitModel(model_weights(model, **options), freeze_vision="lora" in options)
    packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
    state = split.prefix(prompt, "recompute" if "lora" in options else "keep")
    with torch.enable_grad():
        logprobs = split.suffix(state, packed)
    (logprobs * torch.linspace(-1.0, 2.0, len(logprobs), dtype=logprobs.dtype)).mean().backward()
    split.prefix_backward(state)
    return logprobs.detach()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_those_of_the_merged_model(kit: Any, family: str) -> None:
    model = kit.model(family, torch.float64)
    attach_adapters(model, LORA)
    disturb(model)
    full = merged(kit.model(family, torch.float64), model)
    prompt, responses = kit.prompt(family, 3, **MEDIA), kit.responses(3, [3, 1, 4])
    ours = trained(model, prompt, responses, lora=LORA)
    assert (ours - trained(full, prompt, responses)).abs().max() < 1e-12
    factors, wanted = dict(model.named_parameters()), dict(full.named_parameters())
    stems = [name.removesuffix(".lora_A.weight") for name in factors if name.endswith("lora_A.weight")]
    assert len(stems) == 3 * len(ADAPTED_MODULES)  # of three layers
    for stem in stems:
        a, b = factors[f"{stem}.lora_A.weight"], factors[f"{stem}.lora_B.weight"]
        grad = wanted[f"{stem}.weight"].grad
        assert grad is not None and a.grad is not None and b.grad is not None and grad.abs().max() > 1e-6, stem
        assert (b.grad - LORA.scale * grad @ a.T).abs().max() < 1e-12, stem
        assert (a.grad - LORA.scale * b.T @ grad).abs().max() < 1e-12, stem


@pytest.mark.scenario
@pytest.mark.parametrize("family", FAMILIES)
def test_rollout_and_trainer_agree(kit: Any, checkpoints: dict[str, Path], default_group: None, family: str) -> None:
    folder = checkpoints[family]
    config = load_config(folder)
    reader = CheckpointReader(folder, config, parameter_shapes(build_skeleton(config, torch.float32)))
    model, plan = build_shards(config, torch.float32, lora=LORA)
    engine = SglangRollout(RolloutOptions(model_dir=folder, load_weights=False, lora=LORA, kv_tokens=4096))
    try:
        params = engine.parameters()
        bind_views(model, params, plan)
        fill_homes(plan, params, AdaptedReader(reader.read, plan, seed=5).read)
        disturb(model)
        prompt = kit.prompt(family, 6, **MEDIA)
        settings = SamplingSettings(max_new_tokens=12, temperature=1.0, ignore_eos=True)
        engine.publish()
        engine.begin_step()
        engine.submit([GroupRequest(group=0, input=prompt, seeds=(1, 2, 3), settings=settings)])
        results: list[Any] = []
        while engine.has_work():
            results += engine.step()
    finally:
        engine.close()
    responses = [response.token_ids for response in results[0].responses]
    packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
    theirs = torch.tensor([x for response in results[0].responses for x in response.logprobs])
    with torch.no_grad():
        found = []
        for options in ({"lora": LORA}, {}):
            split = SplitModel(model_weights(model, **options), banned_token_ids=kit.banned)
            found.append((split.suffix(split.prefix(prompt, "none"), packed) - theirs).abs().max())
    assert found[0] < 1e-4
    assert found[1] > 0.01  # the base alone says something else
