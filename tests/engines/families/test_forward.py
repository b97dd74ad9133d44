"""Every family: the forward against that of transformers, and the split against the full sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollplex_cli.core.errors import UsageError
from rollplex_cli.engines.trainer.model.families.gather import MODULES, model_weights
from rollplex_cli.engines.trainer.split import SplitModel
from rollplex_cli.plan.families import FAMILIES
from rollplex_cli.rl.packing import pack_suffix

CASES: dict[str, dict[str, Any]] = {
    "text": {"images": [], "videos": []},
    "image": {"images": [(4, 6)], "videos": []},
    "video": {"images": [], "videos": [(4, 8, 8)]},
    "two videos and an image": {"images": [(6, 4)], "videos": [(2, 8, 4), (3, 4, 12)]},
}


def packed_of(prompt: Any, responses: list[list[int]]) -> Any:
    return pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)


def transformers_logprobs(model: Any, prompt: Any, response: list[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt.prompt.token_ids, *response[:-1]]])
    tail = torch.arange(prompt.num_tokens, prompt.num_tokens + len(response) - 1) + prompt.rope_delta
    positions = torch.cat([prompt.position_ids, tail.expand(3, -1)], dim=1).unsqueeze(1)
    extra = {}
    for kind, name in (("video", "pixel_values_videos"), ("image", "pixel_values")):
        media = [m for m in prompt.prompt.media if m.kind == kind]
        if media:
            extra[name] = torch.cat([m.patches for m in media])
            extra[f"{kind}_grid_thw"] = torch.tensor([m.grid_thw for m in media])
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions, **extra).logits[0, prompt.num_tokens - 1 :]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


def gradients_of(model: Any, run: Any, packed: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs and gradients of an advantage-like weighting of them; `run` yields (log-probs, what follows)."""
    model.zero_grad(set_to_none=True)
    logprobs, after = run()
    generator = torch.Generator().manual_seed(9)
    weights = torch.randn(packed.num_tokens, generator=generator, dtype=torch.float64).to(logprobs.dtype)
    (logprobs * weights / packed.num_tokens).sum().backward()
    after()
    return logprobs.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def split_run(split: SplitModel, prompt: Any, packed: Any, mode: Any) -> Any:
    def run() -> Any:
        state = split.prefix(prompt, mode)
        return split.suffix(state, packed), lambda: split.prefix_backward(state)

    return run


def full_run(split: SplitModel, prompt: Any, responses: list[list[int]]) -> Any:
    return lambda: (torch.cat([split.full_logprobs(prompt, r) for r in responses]), lambda: None)


def test_every_family_has_a_forward() -> None:
    assert set(MODULES) == set(FAMILIES)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_forward_equals_that_of_transformers(kit: Any, family: str, case: str) -> None:
    model = kit.model(family)
    split = SplitModel(model_weights(model))
    prompt, responses = kit.prompt(family, 3, **CASES[case]), kit.responses(4, [5, 3])
    expected = torch.cat([transformers_logprobs(model, prompt, response) for response in responses])
    with torch.no_grad():
        full = torch.cat([split.full_logprobs(prompt, response) for response in responses])
        suffix = split.suffix(split.prefix(prompt, "none"), packed_of(prompt, responses))
    assert (full - expected).abs().max() < 1e-5
    assert (suffix - expected).abs().max() < 1e-5


@pytest.mark.parametrize("case", ["text", "two videos and an image"])
@pytest.mark.parametrize("family", FAMILIES)
def test_split_gradient_is_the_full_sequence_gradient(kit: Any, family: str, case: str) -> None:
    model = kit.model(family, torch.float64)
    split = SplitModel(model_weights(model))
    prompt, responses = kit.prompt(family, 3, **CASES[case]), kit.responses(4, [5, 1, 7])
    packed = packed_of(prompt, responses)
    logprobs, ours = gradients_of(model, split_run(split, prompt, packed, "keep"), packed)
    expected_logprobs, expected = gradients_of(model, full_run(split, prompt, responses), packed)
    assert (logprobs - expected_logprobs).abs().max() < 1e-11
    assert set(ours) == set(expected)
    scale = max(1.0, *(float(gradient.abs().max()) for gradient in expected.values()))
    for name, gradient in expected.items():
        assert (ours[name] - gradient).abs().max() < 1e-12 * scale, name
        assert gradient.abs().max() > 0, name
    if case != "text":
        assert set(expected) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("family", FAMILIES)
def test_prefix_modes_are_bit_equal(kit: Any, family: str) -> None:
    model = kit.model(family)
    split = SplitModel(model_weights(model))
    prompt = kit.prompt(family, 3, **CASES["two videos and an image"])
    packed = packed_of(prompt, kit.responses(4, [4, 1, 6]))
    logprobs, expected = gradients_of(model, split_run(split, prompt, packed, "keep"), packed)
    for mode in ("host", "recompute"):
        others, other = gradients_of(model, split_run(split, prompt, packed, mode), packed)
        assert torch.equal(others, logprobs)
        assert set(other) == set(expected)
        for name, gradient in expected.items():
            assert torch.equal(other[name], gradient), (mode, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_frozen_tower_leaves_the_rest_of_the_gradient_as_it_is(kit: Any, family: str) -> None:
    model = kit.model(family)
    prompt = kit.prompt(family, 3, **CASES["video"])
    packed = packed_of(prompt, kit.responses(4, [4, 2]))
    _, expected = gradients_of(model, split_run(SplitModel(model_weights(model)), prompt, packed, "host"), packed)
    for name, param in model.named_parameters():
        param.requires_grad_("visual." not in name)
    for mode in ("keep", "device", "host", "recompute"):
        frozen = SplitModel(model_weights(model), freeze_vision=True)
        _, other = gradients_of(model, split_run(frozen, prompt, packed, mode), packed)
        assert set(other) == {name for name in expected if "visual." not in name}
        assert all(torch.equal(other[name], expected[name]) for name in other)


@pytest.mark.parametrize("family", FAMILIES)
def test_supervised_loss_is_the_mean_over_target_tokens(kit: Any, family: str) -> None:
    model = kit.model(family, torch.float64)
    split = SplitModel(model_weights(model))
    prompts = [kit.prompt(family, seed, **CASES[case]) for seed, case in enumerate(("video", "text", "image"))]
    targets = kit.responses(5, [6, 2, 1])
    with torch.no_grad():
        loss = split.supervised_loss(prompts, targets)
        rows = [split.full_logprobs(p, t) for p, t in zip(prompts, targets, strict=True)]
    assert abs(float(loss) + float(torch.cat(rows).mean())) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_another_activation_is_refused(kit: Any, family: str) -> None:
    model = kit.model(family)
    model.config.vision_config.hidden_act = "relu"
    with pytest.raises(UsageError, match=f"vision MLP of a {family} must have the activation .*, not 'relu'"):
        model_weights(model)
