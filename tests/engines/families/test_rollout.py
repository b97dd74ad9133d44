"""Every family: both engines on the same weights in the same memory, their log-probs of the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from rollplex_cli.engines.rollout.args import RolloutOptions
from rollplex_cli.engines.rollout.base import GroupRequest, SamplingSettings
from rollplex_cli.engines.rollout.engine import SglangRollout
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.trainer.split import SplitModel
from rollplex_cli.engines.weights.skeleton import build_skeleton, load_config
from rollplex_cli.engines.weights.views import bind_views
from rollplex_cli.plan.families import FAMILIES
from rollplex_cli.rl.packing import pack_suffix

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LENGTH = 12
CASES: dict[str, dict[str, Any]] = {
    "text": {"images": [], "videos": []},
    "image": {"images": [(4, 6)], "videos": []},
    "video": {"images": [], "videos": [(4, 8, 8)]},
    "two videos and an image": {"images": [(6, 4)], "videos": [(2, 8, 4), (3, 4, 12)]},
    "still": {"images": [], "videos": [(3, 8, 8)], "still": True},
    # More tokens than one prefill takes: the second piece begins inside the media.
    "long video": {"images": [], "videos": [(10, 12, 12)]},
}
CHUNK = 192


@pytest.fixture(params=FAMILIES, scope="module")
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def engine(family: str, checkpoints: dict[str, Path], default_group: None) -> Iterator[SglangRollout]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    options = RolloutOptions(model_dir=checkpoints[family], kv_tokens=8192, chunked_prefill_tokens=CHUNK)
    built = SglangRollout(options)
    yield built
    built.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def split(family: str, checkpoints: dict[str, Path], engine: SglangRollout, kit: Any) -> SplitModel:
    """The trainer's forward over views of the engine's tensors, which SGLang itself has loaded."""
    module = build_skeleton(load_config(checkpoints[family]), torch.float32)
    bind_views(module, engine.parameters())
    return SplitModel(model_weights(module), banned_token_ids=kit.banned)


@pytest.mark.scenario
@pytest.mark.parametrize("case", CASES)
def test_rollout_and_trainer_agree(kit: Any, family: str, engine: SglangRollout, split: SplitModel, case: str) -> None:
    prompt = kit.prompt(family, 6, **CASES[case])
    assert (prompt.num_tokens > CHUNK) == (case == "long video")
    settings = SamplingSettings(max_new_tokens=LENGTH, temperature=1.0, ignore_eos=True)
    engine.publish()
    engine.begin_step()
    engine.submit([GroupRequest(group=0, input=prompt, seeds=(1, 2, 3), settings=settings)])
    results: list[Any] = []
    while engine.has_work():
        results += engine.step()
    (result,) = results
    responses = [response.token_ids for response in result.responses]
    packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
    with torch.no_grad():
        ours = split.suffix(split.prefix(prompt, "none"), packed)
    theirs = torch.tensor([x for response in result.responses for x in response.logprobs])
    assert len(theirs) == 3 * LENGTH
    assert (ours - theirs).abs().mean() < 1e-5
    assert (ours - theirs).abs().max() < 1e-4
