"""Every family: both engines on the same weights in the same memory, their log-probs of the same tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from rollplex_cli.engines.rollout.args import RolloutOptions
from rollplex_cli.engines.rollout.base import GroupRequest, SamplingSettings
from rollplex_cli.engines.rollout.engine import SglangRollout
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.trainer.model.vision import Encoded
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
    # Beyond the cache's limit: what a group wants is kept all the same.
    embeddings = engine._scheduler.embeddings
    embeddings.max_size = 0
    seen: list[int] = []
    tower = engine._scheduler.model.visual.register_forward_pre_hook(lambda _m, args: seen.append(len(args[0])))
    engine.submit([GroupRequest(group=0, input=prompt, seeds=(1, 2, 3), settings=settings, keep_vision=True)])
    results: list[Any] = []
    offered: list[Any] = []
    while engine.has_work():
        results += engine.step()
        offered += engine.take_vision()
    tower.remove()
    (result,) = results
    check_offered(split, prompt, offered, seen)
    assert not embeddings._kept and not +embeddings._wanted
    responses = [response.token_ids for response in result.responses]
    packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
    with torch.no_grad():
        ours = split.suffix(split.prefix(prompt, "none"), packed)
    theirs = torch.tensor([x for response in result.responses for x in response.logprobs])
    assert len(theirs) == 3 * LENGTH
    assert (ours - theirs).abs().mean() < 1e-5
    assert (ours - theirs).abs().max() < 1e-4


def check_offered(split: SplitModel, prompt: Any, offered: list[Any], seen: list[int]) -> None:
    """The rollout's tower saw every medium once, and put out what the trainer's does."""
    distinct = {(m.content_hash, m.grid_thw): len(m.patches) for m in prompt.prompt.media}
    assert sum(seen) == sum(distinct.values())
    own = split.encode([prompt])
    if own is None:
        assert not offered
        return
    (output,) = offered
    assert output.group == 0 and len(output.pieces) == len(prompt.prompt.media)
    theirs = Encoded.of_columns(torch.cat(output.pieces), own.rows.shape[1])
    assert len(theirs.deepstack) == len(own.deepstack) == len(split.weights.vision.deepstack)
    for a, b in zip((own.rows, *own.deepstack), (theirs.rows, *theirs.deepstack), strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
        assert a.abs().max() > 0.1
    taken, whole = split.prefix(prompt, "none", theirs), split.prefix(prompt, "none")
    for mine, other in zip(taken.boundary, whole.boundary, strict=True):
        torch.testing.assert_close(mine.keys, other.keys, atol=1e-4, rtol=1e-4)
    from_theirs, from_own = (patch_gradient(split, prompt, media) for media in (theirs, None))
    torch.testing.assert_close(from_theirs, from_own, atol=1e-4 * float(from_own.abs().max()), rtol=1e-3)
    assert from_own.abs().max() > 0


def patch_gradient(split: SplitModel, prompt: Any, media: Encoded | None) -> torch.Tensor:
    """Of the tower's first weight, which every other layer lies in front of, after a trained prefix from `media`."""
    packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, [[3, 4, 5], [6, 7]])
    state = split.prefix(prompt, "recompute", media)
    split.suffix(state, packed).sum().backward()
    split.prefix_backward(state)
    patch = split.weights.vision.patch
    assert patch.grad is not None
    found, patch.grad = patch.grad.clone(), None
    return found
