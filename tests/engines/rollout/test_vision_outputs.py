"""Vision outputs that the engine offers: of the weights of now, once a step, each medium through the tower once."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollplex_cli.engines.rollout.base import VisionOutput
    from rollplex_cli.engines.rollout.engine import SglangRollout

pytestmark = [
    pytest.mark.scenario,
    pytest.mark.parametrize("engine", [False, True], indirect=True, ids=["in_step", "ahead"]),
]
WEIGHT = "visual.merger.ln_q.weight"


@pytest.fixture
def patches_seen(engine: SglangRollout) -> Iterator[list[int]]:
    """Patches of each run of the tower."""
    seen: list[int] = []
    hook = engine._scheduler.model.visual.register_forward_pre_hook(lambda _module, args: seen.append(len(args[0])))
    yield seen
    hook.remove()
    engine.abort()


def wanting(request: Any) -> Any:
    return dataclasses.replace(request, keep_vision=True)


def step_until_offered(engine: SglangRollout, count: int) -> list[VisionOutput]:
    found: list[VisionOutput] = []
    while len(found) < count:
        assert engine.has_work()
        assert engine.step() == []
        found += engine.take_vision()
    return found


def test_groups_that_share_a_clip_share_its_run(
    engine: SglangRollout, kit: Any, tiny: Any, patches_seen: list[int]
) -> None:
    """Two questions about one clip, one about a clip that a prefill takes in three pieces, and text."""
    clip, long = tiny.video(1, (4, 8, 8), 2.0), tiny.video(2, (36, 8, 8), 2.0)
    prompts = [
        tiny.prompt([5, 6], [clip], [7, 8, 9]), tiny.prompt([5, 6], [clip], [10, 11]),
        tiny.prompt([3], [long, clip], [4, 5]), tiny.text_prompt(0, 9),
    ]  # fmt: skip
    assert prompts[2].num_tokens > 2 * 256
    engine.publish()
    engine.begin_step()
    engine.submit([wanting(kit.request(i, p)) for i, p in enumerate(prompts)])
    found = {output.group: output for output in step_until_offered(engine, 3)}
    assert sorted(found) == [0, 1, 2]
    assert [len(piece) for piece in found[2].pieces] == [36 * 16, 4 * 16]
    assert torch.equal(found[0].pieces[0], found[2].pieces[1])
    kit.drain(engine)
    assert engine.take_vision() == []
    assert sum(patches_seen) == len(clip.patches) + len(long.patches)
    assert not engine._scheduler.embeddings._kept  # nobody wants them any more


def test_after_a_publish_a_group_that_goes_on_is_offered_anew(
    engine: SglangRollout, kit: Any, tiny: Any, patches_seen: list[int]
) -> None:
    prompt, weight = tiny.video_prompt(0), engine.parameters()[WEIGHT]
    engine.publish()
    engine.begin_step()
    engine.submit([wanting(kit.request(0, prompt, limits=(9, 2, 2)))])
    (before,) = step_until_offered(engine, 1)
    for _ in range(4):
        engine.step()
    engine.pause()
    kept = weight.clone()
    try:
        weight.mul_(0.5)
        engine.publish()
        engine.begin_step()
        (after,) = step_until_offered(engine, 1)
        kit.drain(engine)
        expected = kit.roll_out(engine, [kit.request(1, prompt)])  # leaves the new weights' output in the cache
        assert expected
    finally:
        weight.copy_(kept)
        engine.publish()
    assert len(patches_seen) == 3
    assert not torch.allclose(before.pieces[0], after.pieces[0], atol=1e-3)
    engine.begin_step()
    engine.submit([wanting(kit.request(2, prompt))])
    (again,) = step_until_offered(engine, 1)
    assert torch.equal(again.pieces[0], before.pieces[0])
