"""Stopping, pausing and continuing in the middle, and new weights in between."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollplex_cli.engines.rollout.engine import SglangRollout

pytestmark = [
    pytest.mark.scenario,
    pytest.mark.parametrize("engine", [False, True], indirect=True, ids=["in_step", "ahead"]),
]

TEXT_WEIGHT = ("model.norm.weight", "model.language_model.norm.weight")
VISION_WEIGHT = ("visual.merger.ln_q.weight", "model.visual.merger.ln_q.weight")


@pytest.fixture
def restored(engine: SglangRollout, hf_model: Any) -> Iterator[None]:
    """Puts the weights of both models back."""
    ours = {n: p.clone() for n, p in engine.parameters().items()}
    theirs = {n: p.detach().clone() for n, p in hf_model.named_parameters()}
    yield
    engine.abort()
    with torch.no_grad():
        for name, parameter in engine.parameters().items():
            parameter.copy_(ours[name])
        for name, parameter in hf_model.named_parameters():
            parameter.copy_(theirs[name])
    engine.publish()


def scale(engine: SglangRollout, hf_model: Any, names: tuple[str, str], factor: float) -> None:
    """The same change in both models, without telling the engine."""
    engine.parameters()[names[0]].mul_(factor)
    with torch.no_grad():
        dict(hf_model.named_parameters())[names[1]].mul_(factor)


def test_abort_running_returns_what_was_generated(engine: SglangRollout, kit: Any, tiny: Any) -> None:
    requests = [kit.request(i, tiny.video_prompt(i), max_new_tokens=12) for i in range(3)]
    full = kit.roll_out(engine, requests)
    engine.publish()
    engine.begin_step()
    engine.submit(requests)
    for _ in range(6):
        assert engine.step() == []
    (aborted,) = engine.abort([1])
    assert aborted.group == 1
    assert aborted.decode_step == 6
    for response, whole in zip(aborted.responses, full[1].responses, strict=True):
        assert response.finish_reason == "abort"
        assert 0 < len(response.token_ids) < 12
        assert response.token_ids == whole.token_ids[: len(response.token_ids)]
        assert response.logprobs == whole.logprobs[: len(response.token_ids)]
    rest = {r.group: r for r in kit.drain(engine)}
    assert sorted(rest) == [0, 2]
    assert all(kit.tokens(rest[i]) == kit.tokens(full[i]) for i in rest)
    engine.begin_step()  # finds no lost KV slot


def test_abort_queued_returns_empty_responses(engine: SglangRollout, kit: Any, tiny: Any) -> None:
    """Nothing stepped yet: neither leader nor siblings have a token."""
    engine.publish()
    engine.begin_step()
    engine.submit([kit.request(i, tiny.video_prompt(i)) for i in range(2)])
    results = engine.abort()
    assert [r.group for r in results] == [0, 1]
    for result in results:
        assert kit.tokens(result) == [(), (), ()]
        assert {r.finish_reason for r in result.responses} == {"abort"}
    assert not engine.has_work()
    engine.begin_step()


def test_abort_in_the_middle_of_a_prefill(engine: SglangRollout, kit: Any, tiny: Any) -> None:
    """The prompt is longer than two prefill chunks and stopped after one."""
    long, short = tiny.video_prompt(5, grid_thw=(36, 8, 8)), tiny.text_prompt(0, 9)
    assert long.num_tokens > 2 * 256
    expected = kit.roll_out(engine, [kit.request(1, short)])
    engine.publish()
    engine.begin_step()
    engine.submit([kit.request(0, long), kit.request(1, short)])
    engine.step()
    (aborted,) = engine.abort([0])
    assert kit.tokens(aborted) == [(), (), ()]
    (other,) = kit.drain(engine)
    assert kit.tokens(other) == kit.tokens(expected[1])
    engine.begin_step()


def test_abort_leaves_a_usable_engine(engine: SglangRollout, kit: Any, tiny: Any) -> None:
    requests = [kit.request(i, tiny.video_prompt(i)) for i in range(3)]
    expected = kit.roll_out(engine, requests)
    for steps in range(5):
        engine.publish()
        engine.begin_step()
        engine.submit(requests)
        for _ in range(steps):
            engine.step()
        engine.abort()
        engine.begin_step()
    again = kit.roll_out(engine, requests)
    assert all(kit.tokens(again[i]) == kit.tokens(expected[i]) for i in range(3))


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5])
def test_pause_changes_no_token(engine: SglangRollout, kit: Any, tiny: Any, steps: int) -> None:
    requests = [kit.request(i, tiny.video_prompt(i)) for i in range(3)]
    requests.append(kit.request(7, tiny.video_prompt(5, grid_thw=(36, 8, 8))))
    expected = kit.roll_out(engine, requests)
    engine.publish()
    engine.begin_step()
    engine.submit(requests)
    for _ in range(steps):
        engine.step()
    engine.pause()
    engine.pause()
    results = {r.group: r for r in kit.drain(engine)}
    assert {i: kit.tokens(r) for i, r in results.items()} == {i: kit.tokens(r) for i, r in expected.items()}
    engine.begin_step()


def test_new_weights_in_the_middle(engine: SglangRollout, hf_model: Any, kit: Any, tiny: Any, restored: None) -> None:
    """Old tokens keep old log-probs and version; new ones are the new model's on the same prefix."""
    prompts = [tiny.video_prompt(i) for i in range(3)]
    requests = [kit.request(i, p, max_new_tokens=10) for i, p in enumerate(prompts)]
    before = kit.roll_out(engine, requests)
    engine.publish()
    old = engine.weight_version
    engine.begin_step()
    engine.submit(requests)
    for _ in range(5):
        engine.step()
    engine.pause()
    scale(engine, hf_model, TEXT_WEIGHT, 1.5)
    scale(engine, hf_model, VISION_WEIGHT, 0.5)
    engine.publish()
    results = {r.group: r for r in kit.drain(engine)}
    for i, prompt in enumerate(prompts):
        for response, was in zip(results[i].responses, before[i].responses, strict=True):
            count = response.weight_versions.count(old)
            assert 0 < count < 10
            assert response.weight_versions == (old,) * count + (old + 1,) * (10 - count)
            assert response.token_ids[:count] == was.token_ids[:count]
            assert response.logprobs[:count] == was.logprobs[:count]
            expected = kit.reference_logprobs(hf_model, prompt, response.token_ids)[count:]
            torch.testing.assert_close(torch.tensor(response.logprobs[count:]), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("names", [TEXT_WEIGHT, VISION_WEIGHT])
def test_publish_drops_everything_computed_under_old_weights(
    engine: SglangRollout, hf_model: Any, kit: Any, tiny: Any, restored: None, names: tuple[str, str]
) -> None:
    prompt = tiny.video_prompt(0)

    def largest_difference() -> float:
        engine.begin_step()
        engine.submit([kit.request(0, prompt)])
        (result,) = kit.drain(engine)
        return max(
            float((torch.tensor(r.logprobs) - kit.reference_logprobs(hf_model, prompt, r.token_ids)).abs().max())
            for r in result.responses
        )

    engine.publish()
    assert largest_difference() < 1e-5
    scale(engine, hf_model, VISION_WEIGHT, 0.5)
    scale(engine, hf_model, names, 1.1)
    # Without a publish the prompt is still that of the old weights, or this test could not fail.
    assert largest_difference() > 1e-3
    engine.publish()
    assert largest_difference() < 1e-5


@pytest.mark.parametrize("seed", range(4))
def test_any_sequence_of_calls_keeps_tokens_and_slots(engine: SglangRollout, kit: Any, tiny: Any, seed: int) -> None:
    """Submit, step, abort, pause and publish in random order: prefixes of the undisturbed tokens, no slot lost."""
    shapes = [(2, 4, 4), (1, 4, 8), (8, 8, 8), (36, 8, 8)]
    requests = {i: kit.request(i, tiny.video_prompt(i, grid_thw=shapes[i % 4]), limits=(9, 1 + i, 4)) for i in range(8)}
    expected = {i: kit.tokens(r) for i, r in kit.roll_out(engine, list(requests.values())).items()}
    engine.publish()
    engine.begin_step()
    choose = random.Random(seed)
    waiting, results = list(requests), {}
    while waiting or engine.has_work():
        call = choose.choice(["submit", "step", "step", "step", "abort", "pause", "publish"])
        live = [i for i in requests if i not in waiting and i not in results]
        finished = []
        if call == "submit" and waiting:
            engine.submit([requests[waiting.pop(choose.randrange(len(waiting)))]])
        elif call == "step":
            finished = engine.step()
        elif call == "abort" and live and choose.random() < 0.3:
            finished = engine.abort([choose.choice(live)])
        elif call == "pause":
            engine.pause()
        elif call == "publish":
            engine.pause()
            engine.publish()
        results.update({r.group: r for r in finished})
    engine.begin_step()
    assert sorted(results) == sorted(requests)
    for i, result in results.items():
        for response, whole in zip(result.responses, expected[i], strict=True):
            assert response.token_ids == whole[: len(response.token_ids)]
            assert response.finish_reason == ("length" if response.token_ids == whole else "abort")
            assert list(response.weight_versions) == sorted(response.weight_versions)
