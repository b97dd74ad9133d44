"""One copy of the weights between the real rollout engine and the real trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollplex_cli.engines.rollout.args import RolloutOptions
from rollplex_cli.engines.rollout.base import GroupRequest, GroupResult, SamplingSettings
from rollplex_cli.engines.rollout.engine import SglangRollout
from rollplex_cli.engines.trainer.actor import Actor
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.engines.weights.export import save_hf
from rollplex_cli.engines.weights.skeleton import build_skeleton, load_config, load_model
from rollplex_cli.engines.weights.views import bind_views, check_views
from rollplex_cli.rl.losses import LossSettings, policy_loss
from rollplex_cli.rl.packing import pack_suffix

GRIDS: list[list[tuple[int, int, int]]] = [[(4, 8, 8)], [], [(2, 4, 12), (3, 8, 8)]]


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def roll_out(engine: SglangRollout, prompts: list[Any], seed: int) -> list[GroupResult]:
    settings = SamplingSettings(max_new_tokens=6, temperature=1.0)
    seeds = [tuple(range(seed + 10 * i, seed + 10 * i + 3)) for i in range(len(prompts))]
    engine.begin_step()
    engine.submit(
        [
            GroupRequest(group=i, input=prompt, seeds=mine, settings=settings)
            for i, (prompt, mine) in enumerate(zip(prompts, seeds, strict=True))
        ]
    )
    results: list[GroupResult] = []
    while engine.has_work():
        results += engine.step()
    return sorted(results, key=lambda result: result.group)


@pytest.mark.scenario
@pytest.mark.usefixtures("process_group")
def test_updates_reach_the_rollout_through_the_views(tiny: Any, tmp_path: Path) -> None:
    source = tmp_path / "base"
    # 190 is not a multiple of 8: the rollout pads the vision MLPs to 192.
    tiny.model(window=56, intermediate=190).save_pretrained(source)
    engine = SglangRollout(RolloutOptions(model_dir=source, kv_tokens=4096))
    try:
        model = build_skeleton(load_config(source), torch.float32)
        table = bind_views(model, engine.parameters())
        assert table.bytes_by_kind()["rebuilt"] == 0
        actor = Actor(model, optimizer=AdamWSettings(lr=1e-3), banned_token_ids=tiny.banned)
        prompts = [tiny.prompt(seed, grids) for seed, grids in enumerate(GRIDS)]
        for step in range(3):
            tokens = 0
            for prompt, result in zip(prompts, roll_out(engine, prompts, 100 * step), strict=True):
                responses = [response.token_ids for response in result.responses]
                packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
                state = actor.prefix(prompt)
                advantages = torch.tensor([1.0, -0.5, 0.25])
                outcome = actor.suffix(
                    state,
                    packed,
                    lambda lp, a=advantages, n=packed.lengths: policy_loss(lp, None, a, None, n, LossSettings()),  # type: ignore[misc]
                )
                actor.prefix_backward(state)
                tokens += outcome.weight
                sampled = torch.tensor([v for response in result.responses for v in response.logprobs])
                assert (sampled - outcome.logprobs).abs().max() < 1e-5, (step, result.group)
            assert actor.update(1 / tokens).grad_norm > 0
            engine.publish()
        check_views(model, table, engine.parameters())
        save_hf(model, tmp_path / "out", source)
        exported = load_model(tmp_path / "out", torch.float32)
        assert torch.equal(exported.model.language_model.norm.weight, engine.parameters()["model.norm.weight"])
        actor.close()
    finally:
        engine.close()
