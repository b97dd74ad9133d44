"""A step of a bundled tiny model of each new family on a real clip: prompt, rollout, loss, update, publish, rollout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollplex_cli.core.resources import model_config_folder
from rollplex_cli.data.processor import PromptBuilder
from rollplex_cli.data.tasks import load_task
from rollplex_cli.data.types import MediaRef, Sample
from rollplex_cli.data.video import write_video
from rollplex_cli.engines.inputs import MediaTokens, build_prompt_input
from rollplex_cli.engines.rollout.args import RolloutOptions
from rollplex_cli.engines.rollout.base import GroupRequest, SamplingSettings
from rollplex_cli.engines.rollout.engine import SglangRollout
from rollplex_cli.engines.trainer.actor import Actor
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.engines.weights.load import CheckpointReader, fill_homes
from rollplex_cli.engines.weights.skeleton import build_shards, build_skeleton, load_config, parameter_shapes
from rollplex_cli.engines.weights.views import bind_views
from rollplex_cli.profile.schema import DataProfile
from rollplex_cli.rl.losses import LossSettings, policy_loss
from rollplex_cli.rl.packing import pack_suffix


@pytest.mark.scenario
@pytest.mark.parametrize("name", ["tiny-qwen2vl", "tiny-qwen3vl"])
def test_one_step_on_a_clip(tmp_path: Path, default_group: None, name: str) -> None:
    source, base = model_config_folder(name), tmp_path / "base"
    assert source is not None
    load_task("shapes").build_base(base, tmp_path, source / "config.json", 3)
    prompt = clip_prompt(base, tmp_path)
    engine = SglangRollout(RolloutOptions(model_dir=base, kv_tokens=4096, load_weights=False))
    config = load_config(base)
    module, plan = build_shards(config, torch.float32)
    params = engine.parameters()
    bind_views(module, params, plan)
    fill_homes(
        plan, params, CheckpointReader(base, config, parameter_shapes(build_skeleton(config, torch.float32))).read
    )
    actor = Actor(
        module,
        optimizer=AdamWSettings(lr=1e-2),
        banned_token_ids=engine.banned_token_ids,
        prefix_activations="host",
    )
    before = {key: param.detach().clone() for key, param in module.named_parameters()}
    packed, first = rollout_and_forward(engine, actor, prompt)
    state = actor.prefix(prompt)
    advantages = torch.tensor([1.0, -1.0])
    actor.suffix(state, packed, lambda lp: policy_loss(lp, None, advantages, None, packed.lengths, LossSettings()))
    actor.prefix_backward(state)
    assert actor.update(1 / packed.num_tokens).applied
    assert all(not torch.equal(param, before[key]) for key, param in module.named_parameters())
    _, second = rollout_and_forward(engine, actor, prompt)
    actor.close()
    engine.close()
    assert max(first, second) < 1e-5


def clip_prompt(base: Path, folder: Path) -> Any:
    path = folder / "clip.mp4"
    write_video(path, np.random.default_rng(1).integers(0, 255, (24, 112, 112, 3), dtype=np.uint8), 12)
    profile = DataProfile(fps=4.0, max_frames=8, min_pixels=784, max_pixels=12544, max_prompt_tokens=512)
    media = (MediaRef(kind="video", path=path),)
    sample = Sample(sample_id="0", question="Which way does the red square move?", answer="left", kind="", media=media)
    tokens = MediaTokens.from_config(json.loads((base / "config.json").read_text(encoding="utf-8")))
    return build_prompt_input(PromptBuilder(base, profile).build(sample), tokens)


def rollout_and_forward(engine: SglangRollout, actor: Actor, prompt: Any) -> tuple[Any, float]:
    """Two responses under the weights as they are, and the mean difference of both engines' log-probs."""
    engine.publish()
    engine.begin_step()
    settings = SamplingSettings(max_new_tokens=8, temperature=1.0, ignore_eos=True)
    engine.submit([GroupRequest(group=0, input=prompt, seeds=(1, 2), settings=settings)])
    results: list[Any] = []
    while engine.has_work():
        results += engine.step()
    responses = results[0].responses
    packed = pack_suffix(
        prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, [r.token_ids for r in responses]
    )
    ours = actor.logprobs(actor.prefix(prompt), packed)
    theirs = torch.tensor([x for response in responses for x in response.logprobs])
    return packed, float((ours - theirs).abs().mean())
