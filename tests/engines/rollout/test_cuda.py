"""The same adapter on a GPU: graphs on a given stream, a thread of its own, weights rewritten in place."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rollplex_cli.engines.rollout.args import RolloutOptions
from rollplex_cli.engines.rollout.engine import SglangRollout

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("default_group")]


def test_generates_what_transformers_scores(tiny_checkpoint: Path, hf_model: Any, kit: Any, tiny: Any) -> None:
    """BF16: two roundings of the head are the level that is left."""
    prompts = [tiny.video_prompt(i, grid_thw=(4, 8, 8)) for i in range(4)]
    requests = [kit.request(i, p, seeds=range(8), max_new_tokens=24) for i, p in enumerate(prompts)]
    found: list[Any] = []

    def roll_out() -> None:
        _, high = torch.cuda.Stream.priority_range()
        stream = torch.cuda.Stream(priority=high)
        options = RolloutOptions(
            model_dir=tiny_checkpoint,
            device="cuda",
            dtype="bfloat16",
            kv_tokens=8192,
            max_running_requests=32,
            memory_fraction=0.5,
            stream=stream,
        )
        engine = SglangRollout(options)
        first = kit.roll_out(engine, requests)
        again = kit.roll_out(engine, requests)
        with torch.cuda.stream(stream):
            engine.parameters()["model.norm.weight"].mul_(1.5)
        changed = kit.roll_out(engine, requests)
        engine.begin_step()
        engine.close()
        found.extend([first, again, changed])

    worker = threading.Thread(target=roll_out)
    worker.start()
    worker.join()
    assert len(found) == 3, "the rollout thread failed"
    first, again, changed = found
    judge = hf_model.to("cuda", torch.bfloat16)
    with torch.device("cuda"):
        for i, prompt in enumerate(prompts):
            assert [r.cached_tokens for r in first[i].responses][1:] == [prompt.num_tokens - 1] * 7
            assert kit.tokens(first[i]) == kit.tokens(again[i])
            assert kit.tokens(first[i]) != kit.tokens(changed[i])
            for response in first[i].responses:
                expected = kit.reference_logprobs(judge, kit.on(prompt, "cuda"), response.token_ids)
                assert float((torch.tensor(response.logprobs) - expected).abs().mean()) < 0.06
