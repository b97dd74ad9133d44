"""One hosted engine per module, and the Hugging Face model as its judge."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rollplex_cli.data.compat import ensure_torchvision
from rollplex_cli.engines.rollout.args import RolloutOptions
from rollplex_cli.engines.rollout.base import GroupRequest, SamplingSettings
from rollplex_cli.engines.rollout.engine import SglangRollout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.engines.rollout.base import GroupResult

BANNED = (381, 382)


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tiny_checkpoint: Path, default_group: None) -> Iterator[SglangRollout]:
    """An engine with room for everything, prefilling at most 256 tokens in a step; running ahead where asked to."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run_ahead = bool(getattr(request, "param", False))
    built = SglangRollout(
        RolloutOptions(model_dir=tiny_checkpoint, kv_tokens=8192, chunked_prefill_tokens=256, run_ahead=run_ahead)
    )
    yield built
    built.close()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def hf_model(tiny_checkpoint: Path) -> Any:
    """The same weights in transformers, float32."""
    ensure_torchvision()
    from transformers import Qwen2_5_VLForConditionalGeneration

    return Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()


class RolloutKit:
    """Short forms for rollout tests; a fixture, because test modules cannot import one another."""

    banned = BANNED

    @staticmethod
    @torch.no_grad()
    def reference_distribution(
        model: Any, prompt: PromptInput, tokens: Sequence[int], temperature: float = 1.0
    ) -> torch.Tensor:
        """[tokens, vocabulary] log-probs before each of `tokens`, by one full forward with explicit positions."""
        generated = torch.arange(len(tokens)) + prompt.num_tokens + prompt.rope_delta
        positions = torch.cat([prompt.position_ids, generated.expand(3, -1)], dim=1).unsqueeze(1)
        ids = torch.tensor([[*prompt.prompt.token_ids, *tokens]])
        media: dict[str, torch.Tensor] = {}
        for kind, name in (("video", "pixel_values_videos"), ("image", "pixel_values")):
            chosen = [m for m in prompt.prompt.media if m.kind == kind]
            if chosen:
                media[name] = torch.cat([m.patches for m in chosen])
                media[f"{kind}_grid_thw"] = torch.tensor([m.grid_thw for m in chosen])
        logits = model(input_ids=ids, position_ids=positions, use_cache=False, **media).logits[0]
        logits = logits[prompt.num_tokens - 1 : -1].float() / temperature
        logits[:, list(BANNED)] = -torch.inf
        return torch.log_softmax(logits, dim=-1)

    @staticmethod
    def on(prompt: PromptInput, device: str) -> PromptInput:
        """`prompt` with its tensors on `device`."""
        media = tuple(dataclasses.replace(m, patches=m.patches.to(device)) for m in prompt.prompt.media)
        moved = dataclasses.replace(prompt.prompt, media=media)
        return dataclasses.replace(prompt, prompt=moved, position_ids=prompt.position_ids.to(device))

    @staticmethod
    def reference_logprobs(
        model: Any, prompt: PromptInput, tokens: Sequence[int], temperature: float = 1.0
    ) -> torch.Tensor:
        """Log-probs of `tokens` after `prompt`."""
        distribution = RolloutKit.reference_distribution(model, prompt, tokens, temperature)
        return distribution.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)

    @staticmethod
    def settings(max_new_tokens: int = 8, **changes: Any) -> SamplingSettings:
        """Temperature 1, no cuts, exact lengths."""
        values: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, **changes}
        return SamplingSettings(max_new_tokens=max_new_tokens, **values)

    @staticmethod
    def request(group: int, prompt: PromptInput, seeds: Sequence[int] = (1, 2, 3), **changes: Any) -> GroupRequest:
        """A group of one response per seed; `changes` go to the settings."""
        limits = changes.pop("limits", None)
        return GroupRequest(
            group=group,
            input=prompt,
            seeds=tuple(seeds),
            settings=RolloutKit.settings(**changes),
            max_new_tokens=limits,
        )

    @staticmethod
    def drain(engine: SglangRollout) -> list[GroupResult]:
        """Step until nothing is left."""
        results: list[GroupResult] = []
        while engine.has_work():
            results += engine.step()
        return results

    @staticmethod
    def roll_out(engine: SglangRollout, requests: Sequence[GroupRequest]) -> dict[int, GroupResult]:
        """A whole step from clean caches, by group."""
        engine.publish()
        engine.begin_step()
        engine.submit(requests)
        return {result.group: result for result in RolloutKit.drain(engine)}

    @staticmethod
    def tokens(result: GroupResult) -> list[tuple[int, ...]]:
        """Token ids of the responses."""
        return [response.token_ids for response in result.responses]


@pytest.fixture(scope="session")
def kit() -> type[RolloutKit]:
    """Short forms for rollout tests."""
    return RolloutKit
