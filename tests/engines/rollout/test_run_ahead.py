"""Running ahead of the device: the same tokens and log-probs as step by step, with a known order of completion."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from rollplex_cli.engines.rollout.args import RolloutOptions
from rollplex_cli.engines.rollout.engine import SglangRollout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.scenario, pytest.mark.usefixtures("default_group")]


@pytest.fixture
def with_engine(tiny_checkpoint: Path) -> Callable[..., Any]:
    """Runs a function on an engine of its own."""

    def call(work: Callable[[SglangRollout], Any], **options: Any) -> Any:
        values = {"kv_tokens": 4096, "chunked_prefill_tokens": 256, **options}
        engine = SglangRollout(RolloutOptions(model_dir=tiny_checkpoint, **values))
        try:
            return work(engine)
        finally:
            engine.close()

    return call


def answers(results: dict[int, Any]) -> dict[int, Any]:
    """What does not depend on who decodes beside whom."""
    return {
        group: [(r.token_ids, r.finish_reason, r.cached_tokens) for r in result.responses]
        for group, result in results.items()
    }


def logprobs(results: dict[int, Any]) -> torch.Tensor:
    """Of all tokens; rounding depends on the batch's size."""
    return torch.tensor([value for result in results.values() for r in result.responses for value in r.logprobs])


def test_equal_to_step_by_step(with_engine: Callable[..., Any], kit: Any, tiny: Any) -> None:
    """Prompts of several chunks, siblings, end tokens, limits of one token, top-p beside plain sampling."""
    shapes = [(2, 4, 4), (1, 4, 8), (8, 8, 8), (36, 8, 8)]
    requests = [
        kit.request(i, tiny.video_prompt(i, grid_thw=shapes[i % 4]), seeds=(i, i + 1, i + 2), limits=(9, 1 + i, 1))
        for i in range(8)
    ]
    requests.append(kit.request(20, tiny.text_prompt(0, 9), seeds=range(20), ignore_eos=False, max_new_tokens=120))
    requests.append(kit.request(21, tiny.text_prompt(1, 9), top_p=0.5))

    def work(engine: SglangRollout) -> tuple[dict[int, Any], dict[int, Any]]:
        runs = kit.roll_out(engine, requests), kit.roll_out(engine, requests)
        engine.begin_step()  # finds no lost KV slot
        return runs

    expected, _ = with_engine(work)
    found, again = with_engine(work, run_ahead=True)
    assert answers(found) == answers(expected)
    torch.testing.assert_close(
        logprobs(dict(sorted(found.items()))), logprobs(dict(sorted(expected.items()))), atol=1e-5, rtol=0
    )
    assert any(reason == "stop" for _, reason, _ in answers(found)[20])
    # The logical time of completion is a function of the requests here too; an end is seen later than step by step.
    assert {g: r.decode_step for g, r in found.items()} == {g: r.decode_step for g, r in again.items()}
    assert torch.equal(logprobs(found), logprobs(again))
    assert all(found[g].decode_step > expected[g].decode_step for g in found)


def test_a_pool_too_small_for_all(
    with_engine: Callable[..., Any], kit: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests are taken back while a batch with them is under way, and computed again."""
    requests = [kit.request(i, tiny.text_prompt(i, 20), seeds=range(8), max_new_tokens=80) for i in range(4)]
    retracted: list[int] = []

    def work(engine: SglangRollout) -> dict[int, list[tuple[int, ...]]]:
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        original = ScheduleBatch.retract_decode

        def counted(batch: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(batch, *args, **kwargs)
            retracted.append(len(found[0]))
            return found

        with monkeypatch.context() as patch:
            patch.setattr(ScheduleBatch, "retract_decode", counted)
            results = kit.roll_out(engine, requests)
        engine.begin_step()
        return {group: kit.tokens(result) for group, result in results.items()}

    expected = with_engine(work)
    assert not retracted
    assert with_engine(work, run_ahead=True, kv_tokens=1024) == expected
    assert retracted, "the pool was large enough: nothing was tested"


def test_an_end_is_seen_one_step_later(with_engine: Callable[..., Any], kit: Any, tiny: Any) -> None:
    """Once for the leaders' first tokens, on which their siblings wait, and once for the last."""
    lengths = {5: 3, 1: 3, 3: 6}

    def work(engine: SglangRollout) -> list[tuple[int, int]]:
        engine.publish()
        engine.begin_step()
        engine.submit([kit.request(g, tiny.text_prompt(g, 9), max_new_tokens=n) for g, n in lengths.items()])
        results = kit.drain(engine)
        assert not engine._scheduler.holds_kv, "a batch is under way with no group left"
        return [(r.group, r.decode_step) for r in results]

    assert with_engine(work) == [(1, 4), (5, 4), (3, 7)]
    assert with_engine(work, run_ahead=True) == [(1, 6), (5, 6), (3, 9)]


def test_a_group_that_ends_under_way_is_not_lost(with_engine: Callable[..., Any], kit: Any, tiny: Any) -> None:
    """`pause` takes in its last tokens; the next step returns it, in the step's own time."""

    def work(engine: SglangRollout) -> None:
        prompt = tiny.text_prompt(0, 9)
        (expected,) = kit.roll_out(engine, [kit.request(0, prompt, seeds=(1,), max_new_tokens=3)]).values()
        engine.publish()
        engine.begin_step()
        engine.submit([kit.request(0, prompt, seeds=(1,), max_new_tokens=3)])
        for _ in range(3):
            assert engine.step() == []
        engine.pause()
        assert engine.num_running == 0
        assert engine.has_work()
        engine.publish()
        engine.begin_step()
        with pytest.raises(ValueError, match="already in use"):
            engine.submit([kit.request(0, prompt)])
        (result,) = engine.step()
        assert (result.group, result.decode_step) == (0, 1)
        assert result.responses[0].token_ids == expected.responses[0].token_ids
        assert set(result.responses[0].weight_versions) == {engine.weight_version - 1}
        assert not engine.has_work()

    with_engine(work, run_ahead=True)
