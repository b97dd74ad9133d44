"""Adapters inside the engine: the trainer's own tensors, the base where they are zero, the merged model where not."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rollplex_cli.engines.lora.adapters import AdaptedReader, LoraSettings
from rollplex_cli.engines.rollout.args import RolloutOptions
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

pytestmark = [pytest.mark.scenario, pytest.mark.usefixtures("default_group")]

ALL = tuple(ADAPTED_MODULES)
PARITY = 1e-5


def settings(targets: tuple[str, ...]) -> LoraSettings:
    return LoraSettings(rank=4, alpha=8.0, targets=targets)


def bound(folder: Path, engine: SglangRollout, lora: LoraSettings, dtype: torch.dtype) -> Any:
    """The trainer's module over the engine's tensors, weights from the checkpoint, adapters at their first values."""
    config = load_config(folder)
    reader = CheckpointReader(folder, config, parameter_shapes(build_skeleton(config, torch.float32)))
    model, plan = build_shards(config, dtype, lora=lora)
    params = engine.parameters()
    bind_views(model, params, plan)
    fill_homes(plan, params, AdaptedReader(reader.read, plan, seed=5).read)
    return model


@torch.no_grad()
def disturb(model: Any) -> None:
    """Adapters far from zero, through the trainer's views."""
    generator = torch.Generator().manual_seed(3)
    for name, param in model.named_parameters():
        if is_adapter(name):
            param.copy_(torch.randn(param.shape, generator=generator) * 0.15)


@torch.no_grad()
def merged(hf_model: Any, model: Any, lora: LoraSettings) -> Any:
    """The Hugging Face model with W + scale B A."""
    judge, factors = copy.deepcopy(hf_model), dict(model.named_parameters())
    for name, param in judge.named_parameters():
        stem = name.removesuffix(".weight")
        if f"{stem}.lora_A.weight" in factors:
            a, b = factors[f"{stem}.lora_A.weight"], factors[f"{stem}.lora_B.weight"]
            param += lora.scale * (b.cpu().double() @ a.cpu().double()).to(param)
    return judge


def trainer_logprobs(split: SplitModel, prompt: Any, responses: Any) -> torch.Tensor:
    """Log-probs of all tokens of some responses, in order."""
    tokens = [r.token_ids for r in responses]
    packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, tokens)
    with torch.no_grad():
        return split.suffix(split.prefix(prompt, "none"), packed)


@pytest.mark.parametrize("targets", [ALL, ("v_proj", "q_proj", "up_proj"), ("o_proj",)])
def test_samples_from_the_adapted_model(
    tiny_checkpoint: Path, hf_model: Any, kit: Any, tiny: Any, targets: tuple[str, ...]
) -> None:
    prompts = [tiny.video_prompt(0), tiny.text_prompt(1, 20)]
    requests = [kit.request(i, p, seeds=range(4), max_new_tokens=16) for i, p in enumerate(prompts)]
    common: dict[str, Any] = {"model_dir": tiny_checkpoint, "kv_tokens": 4096}
    plain = SglangRollout(RolloutOptions(**common))
    base = kit.roll_out(plain, requests)
    plain.close()
    lora = settings(targets)
    engine = SglangRollout(RolloutOptions(load_weights=False, lora=lora, **common))
    try:
        model = bound(tiny_checkpoint, engine, lora, torch.float32)
        own = {name for name in engine.parameters() if "lora_" in name}
        assert len(own) == 2 * 2 * len({ADAPTED_MODULES[t][1] for t in targets})  # A and B, two layers
        first = kit.roll_out(engine, requests)
        for i in range(len(prompts)):
            assert kit.tokens(first[i]) == kit.tokens(base[i])
            assert [r.logprobs for r in first[i].responses] == [r.logprobs for r in base[i].responses]
        disturb(model)
        adapted = kit.roll_out(engine, requests)
        judge, split = (
            merged(hf_model, model, lora),
            SplitModel(model_weights(model, lora=lora), banned_token_ids=kit.banned),
        )
        for i, prompt in enumerate(prompts):
            assert kit.tokens(adapted[i]) != kit.tokens(base[i])
            ours = trainer_logprobs(split, prompt, adapted[i].responses)
            theirs = torch.tensor([x for r in adapted[i].responses for x in r.logprobs])
            assert (ours - theirs).abs().max() < PARITY
            for response in adapted[i].responses:
                expected = kit.reference_logprobs(judge, prompt, response.token_ids)
                assert torch.allclose(torch.tensor(response.logprobs), expected, atol=2e-5)
    finally:
        engine.close()


@pytest.mark.gpu
def test_decode_graphs_follow_the_adapters(tiny_checkpoint: Path, kit: Any, tiny: Any) -> None:
    """Graphs were captured while every adapter was zero; what the trainer writes later is what they decode with."""
    prompt, lora = tiny.video_prompt(0), settings(ALL)
    requests = [kit.request(0, kit.on(prompt, "cuda"), seeds=range(8), max_new_tokens=24)]
    engine = SglangRollout(
        RolloutOptions(
            model_dir=tiny_checkpoint, load_weights=False, lora=lora, device="cuda", dtype="bfloat16", kv_tokens=4096,
            max_running_requests=32, memory_fraction=0.5,
        )
    )  # fmt: skip
    try:
        model = bound(tiny_checkpoint, engine, lora, torch.bfloat16)
        before = kit.roll_out(engine, requests)[0]
        disturb(model)
        torch.cuda.synchronize()
        after = kit.roll_out(engine, requests)[0]
        assert kit.tokens(before) != kit.tokens(after)
        split = SplitModel(model_weights(model, lora=lora), banned_token_ids=kit.banned)
        with torch.device("cuda"):
            ours = trainer_logprobs(split, kit.on(prompt, "cuda"), after.responses).cpu()
        theirs = torch.tensor([x for r in after.responses for x in r.logprobs])
        assert (ours - theirs).abs().mean() < 0.05
    finally:
        engine.close()
