"""A prefix from a vision output that is there already: the same results, without a run of the tower."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from rollplex_cli.engines.reference.reference import Reference
from rollplex_cli.engines.trainer.actor import is_vision
from rollplex_cli.engines.trainer.model import vision
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.trainer.split import SplitModel
from rollplex_cli.plan.families import FAMILIES
from rollplex_cli.rl.packing import pack_suffix

if TYPE_CHECKING:
    from rollplex_cli.engines.trainer.model.vision import Encoded
    from rollplex_cli.engines.trainer.prefix import PrefixMode

MEDIA: dict[str, Any] = {"images": [(4, 6)], "videos": [(2, 8, 4)]}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Patches of each run of the trainer's tower."""
    seen: list[int] = []
    real = vision.patch_embed

    def counted(weights: Any, patches: torch.Tensor, layout: Any) -> torch.Tensor:
        seen.append(len(patches))
        return real(weights, patches, layout)

    monkeypatch.setattr(vision, "patch_embed", counted)
    return seen


def gradients(
    model: Any, split: SplitModel, prompt: Any, mode: PrefixMode, media: Encoded | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of two responses and the gradients of their sum."""
    model.zero_grad()
    responses = [[3, 4, 5], [6, 7]]
    packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
    state = split.prefix(prompt, mode, media)
    logprobs = split.suffix(state, packed)
    logprobs.sum().backward()
    split.prefix_backward(state)
    return logprobs.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", ["keep", "device", "host", "recompute"])
def test_a_frozen_tower_does_not_run_at_all(kit: Any, family: str, mode: PrefixMode, runs: list[int]) -> None:
    model, prompt = kit.model(family), kit.prompt(family, 3, **MEDIA)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not is_vision(name))
    split = SplitModel(model_weights(model), freeze_vision=True)
    own = gradients(model, split, prompt, mode, None)
    assert len(runs) == (2 if mode == "recompute" else 1)
    media = split.encode([prompt])
    del runs[:]
    shared = gradients(model, split, prompt, mode, media)
    assert not runs
    assert torch.equal(shared[0], own[0])
    assert shared[1].keys() == own[1].keys() and all(torch.equal(shared[1][n], own[1][n]) for n in own[1])
    # What the media look like does matter, or this would prove nothing.
    assert media is not None
    other = gradients(model, split, prompt, mode, media._replace(rows=media.rows * 0.5))
    assert not torch.equal(other[0], own[0])


def test_a_trained_tower_runs_in_the_backward_only(kit: Any, family: str, runs: list[int]) -> None:
    model, prompt = kit.model(family), kit.prompt(family, 3, **MEDIA)
    split = SplitModel(model_weights(model))
    own = gradients(model, split, prompt, "recompute", None)
    assert any(is_vision(name) for name in own[1])
    media = split.encode([prompt])
    stages = len(runs)  # forward and recomputation, each once; the stage's own backward; `encode`
    del runs[:]
    shared = gradients(model, split, prompt, "recompute", media)
    assert len(runs) == stages - 2
    assert torch.equal(shared[0], own[0])
    assert shared[1].keys() == own[1].keys() and all(torch.equal(shared[1][n], own[1][n]) for n in own[1])
    # Stage inputs from another tower's output would give other digits than those made again from the own one's.
    for mode in ("keep", "device", "host"):
        with pytest.raises(ValueError, match="needs the tower's own forward"):
            split.prefix(prompt, mode, media)  # type: ignore[arg-type]


def test_the_reference_takes_the_actors(kit: Any, family: str, runs: list[int]) -> None:
    model, prompt = kit.model(family), kit.prompt(family, 3, **MEDIA)
    reference, split = Reference(model), SplitModel(model_weights(kit.model(family)))
    own = reference.prefix(prompt)
    media = split.encode([prompt])
    del runs[:]
    shared = reference.prefix(prompt, media)
    assert not runs
    for mine, theirs in zip(shared.boundary, own.boundary, strict=True):
        assert torch.equal(mine.keys, theirs.keys) and torch.equal(mine.values, theirs.values)
    with pytest.raises(ValueError, match="placeholders, not"):
        reference.prefix(kit.prompt(family, 3, images=[(4, 6)], videos=[]), media)
