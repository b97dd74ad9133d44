"""The split against the full sequence, and the full sequence against the Hugging Face forward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from rollplex_cli.engines.trainer.model import vision
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.trainer.split import SplitModel
from rollplex_cli.rl.packing import pack_suffix

VIDEO_GRIDS = [(4, 8, 8)]


def group(tiny: Any, grids: list[tuple[int, int, int]], lengths: list[int], seed: int = 3) -> tuple[Any, Any, Any]:
    prompt = tiny.prompt(seed, grids)
    responses = tiny.responses(seed, lengths)
    packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
    return prompt, responses, packed


def token_weights(packed: Any, dtype: torch.dtype) -> torch.Tensor:
    """Advantage-like weights of a token-mean loss."""
    generator = torch.Generator().manual_seed(9)
    weights = torch.randn(packed.num_tokens, generator=generator, dtype=torch.float64)
    return (weights / packed.num_tokens).to(dtype)


def split_gradients(
    model: Any, prompt: Any, packed: Any, mode: Any, **options: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    split = SplitModel(model_weights(model), **options)
    model.zero_grad(set_to_none=True)
    state = split.prefix(prompt, mode)
    logprobs = split.suffix(state, packed)
    (logprobs * token_weights(packed, logprobs.dtype)).sum().backward()
    split.prefix_backward(state)
    return logprobs.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def full_gradients(
    model: Any, prompt: Any, responses: Any, packed: Any, **options: Any
) -> tuple[torch.Tensor, dict[str, Any]]:
    split = SplitModel(model_weights(model), **options)
    model.zero_grad(set_to_none=True)
    logprobs = torch.cat([split.full_logprobs(prompt, response) for response in responses])
    (logprobs * token_weights(packed, logprobs.dtype)).sum().backward()
    return logprobs.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def part(name: str) -> str:
    if "visual.merger" in name:
        return "projector"
    return "vision" if "visual" in name else "language"


CASES = {
    "one-response": (VIDEO_GRIDS, [12]),
    "three-unequal": (VIDEO_GRIDS, [5, 1, 7]),
    "eight": (VIDEO_GRIDS, [6, 6, 2, 6, 1, 6, 8, 6]),
    "single-token": (VIDEO_GRIDS, [1]),
    "text-only": ([], [14, 9, 20, 6]),
    "two-videos": ([(2, 8, 8), (3, 4, 12)], [3, 5]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_split_gradient_is_the_full_sequence_gradient(tiny: Any, case: str, dtype: torch.dtype, limit: float) -> None:
    grids, lengths = CASES[case]
    # Windows smaller than the frame, so that window and full attention differ.
    model = tiny.model(dtype, window=56, tied=case != "eight")
    prompt, responses, packed = group(tiny, grids, lengths)
    logprobs, split = split_gradients(model, prompt, packed, "keep")
    full_logprobs, full = full_gradients(model, prompt, responses, packed)
    assert (logprobs - full_logprobs).abs().max() < limit * 10
    assert set(split) == set(full)
    seen = set()
    # Absolute, or relative to the largest gradient where that is above one.
    scale = max(1.0, *(float(gradient.abs().max()) for gradient in full.values()))
    for name, expected in full.items():
        assert (split[name] - expected).abs().max() < limit * scale, name
        assert expected.abs().max() > 0, name
        seen.add(part(name))
    assert seen == ({"language"} if not grids else {"language", "projector", "vision"})


@pytest.mark.parametrize("grids", [VIDEO_GRIDS, [], [(2, 8, 8), (3, 4, 12)]])
def test_prefix_modes_are_bit_equal(tiny: Any, grids: list[tuple[int, int, int]]) -> None:
    model = tiny.model(window=56, layers=3)
    prompt, _, packed = group(tiny, grids, [4, 1, 6])
    logprobs, expected = split_gradients(model, prompt, packed, "keep")
    for mode in ("host", "recompute"):
        other_logprobs, other = split_gradients(model, prompt, packed, mode)
        assert torch.equal(other_logprobs, logprobs)
        assert set(other) == set(expected)
        for name, gradient in expected.items():
            assert torch.equal(other[name], gradient), (mode, name)


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 9])
def test_layers_that_run_again_are_bit_equal(tiny: Any, kept: int) -> None:
    model = tiny.model(window=56, layers=3)
    prompt, _, packed = group(tiny, VIDEO_GRIDS, [4, 1, 6])
    logprobs, expected = split_gradients(model, prompt, packed, "recompute")
    other_logprobs, other = split_gradients(model, prompt, packed, "recompute", suffix_kept_layers=kept)
    assert torch.equal(other_logprobs, logprobs)
    assert set(other) == set(expected)
    for name, gradient in expected.items():
        assert torch.equal(other[name], gradient), name


def test_single_decoder_layer(tiny: Any) -> None:
    model = tiny.model(layers=1)
    prompt, _, packed = group(tiny, VIDEO_GRIDS, [4, 2])
    _, expected = split_gradients(model, prompt, packed, "keep")
    for mode in ("host", "recompute"):
        _, other = split_gradients(model, prompt, packed, mode)
        assert all(torch.equal(other[name], gradient) for name, gradient in expected.items())


def test_two_runs_are_bit_equal(tiny: Any) -> None:
    model = tiny.model()
    prompt, _, packed = group(tiny, VIDEO_GRIDS, [4, 1, 6])
    _, first = split_gradients(model, prompt, packed, "recompute")
    _, second = split_gradients(model, prompt, packed, "recompute")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_prompt_of_one_token_has_an_empty_prefix(tiny: Any) -> None:
    model = tiny.model(torch.float64)
    prompt = tiny.prompt(1, [], words=1)
    assert prompt.num_tokens == 1
    responses = tiny.responses(1, [3, 2])
    packed = pack_suffix(prompt.prompt.token_ids[-1], 1, prompt.rope_delta, responses)
    for mode in ("keep", "recompute"):
        logprobs, split = split_gradients(model, prompt, packed, mode)
        full_logprobs, full = full_gradients(model, prompt, responses, packed)
        assert (logprobs - full_logprobs).abs().max() < 1e-12
        assert all((split[name] - full[name]).abs().max() < 1e-12 for name in full)


def test_prompt_ending_in_media_is_refused(tiny: Any) -> None:
    prompt = tiny.prompt(1, [(1, 4, 4)], words=3)
    end = prompt.media_spans[0][1] + 1
    cut = replace(
        prompt,
        prompt=replace(prompt.prompt, token_ids=prompt.prompt.token_ids[:end]),
        position_ids=prompt.position_ids[:, :end],
    )
    with pytest.raises(ValueError, match="media placeholder"):
        SplitModel(model_weights(tiny.model())).prefix(cut, "keep")


def test_a_state_is_consumed_once(tiny: Any) -> None:
    split = SplitModel(model_weights(tiny.model()))
    prompt, _, packed = group(tiny, [], [2])
    state = split.prefix(prompt, "keep")
    with pytest.raises(ValueError, match="no suffix backward"):
        split.prefix_backward(state)
    split.suffix(state, packed).sum().backward()
    split.prefix_backward(state)
    with pytest.raises(ValueError, match="twice"):
        split.prefix_backward(state)
    with pytest.raises(ValueError, match="consumed"):
        split.suffix(state, packed)
    with pytest.raises(ValueError, match="no backward"):
        split.prefix_backward(split.prefix(prompt, "none"))


def test_reference_prefix_keeps_no_graph(tiny: Any) -> None:
    split = SplitModel(model_weights(tiny.model()))
    prompt, _, packed = group(tiny, VIDEO_GRIDS, [3])
    state = split.prefix(prompt, "none")
    assert not any(t.requires_grad for pair in state.boundary for t in pair)
    with torch.no_grad():
        without = split.suffix(state, packed)
    with_graph = split.suffix(split.prefix(prompt, "keep"), packed)
    assert with_graph.requires_grad
    assert torch.allclose(without, with_graph, atol=1e-6)
    assert state.boundary_bytes == 2 * 2 * 2 * 32 * 4 * state.num_tokens


def test_temperature_and_banned_ids_follow_the_sampler(tiny: Any) -> None:
    model = tiny.model(torch.float64)
    prompt, _, packed = group(tiny, VIDEO_GRIDS, [4])
    plain = SplitModel(model_weights(model))
    state = plain.prefix(prompt, "none")
    with torch.no_grad():
        hidden_logits = _logits(plain, state, packed)
        logits = hidden_logits.clone()
        logits[:, list(tiny.banned)] = float("-inf")
        expected = (logits / 0.7).log_softmax(-1).gather(1, packed.targets[:, None])[:, 0]
        scaled = SplitModel(model_weights(model), temperature=0.7, banned_token_ids=tiny.banned)
        assert (scaled.suffix(state, packed) - expected).abs().max() < 1e-12


def _logits(split: SplitModel, state: Any, packed: Any) -> torch.Tensor:
    """All logits, from one log-prob per vocabulary entry (they differ from logits by a constant per row)."""
    targets = [torch.full_like(packed.targets, token) for token in range(split.weights.head.shape[0])]
    return torch.stack([split.suffix(state, replace(packed, targets=t)) for t in targets], dim=1)


def _hf_logprobs(model: Any, prompt: Any, response: list[int]) -> torch.Tensor:
    ids = torch.tensor([[*prompt.prompt.token_ids, *response[:-1]]])
    tail = torch.arange(prompt.num_tokens, prompt.num_tokens + len(response) - 1) + prompt.rope_delta
    positions = torch.cat([prompt.position_ids, tail.expand(3, -1)], dim=1).unsqueeze(1)
    media = prompt.prompt.media
    extra = {}
    if media:
        extra = {
            "pixel_values_videos": torch.cat([m.patches for m in media]),
            "video_grid_thw": torch.tensor([m.grid_thw for m in media]),
        }
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions, **extra).logits[0, prompt.num_tokens - 1 :]
    return logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]


@pytest.mark.parametrize("grids", [[], VIDEO_GRIDS, [(2, 8, 8), (3, 4, 12)], [(2, 10, 6)]])
@pytest.mark.parametrize("window", [112, 56])
def test_forward_equals_hugging_face(tiny: Any, grids: list[tuple[int, int, int]], window: int) -> None:
    model = tiny.model(window=window)
    split = SplitModel(model_weights(model))
    prompt, responses, packed = group(tiny, grids, [5, 3])
    expected = torch.cat([_hf_logprobs(model, prompt, response) for response in responses])
    with torch.no_grad():
        full = torch.cat([split.full_logprobs(prompt, response) for response in responses])
        suffix = split.suffix(split.prefix(prompt, "none"), packed)
    assert (full - expected).abs().max() < 1e-5
    assert (suffix - expected).abs().max() < 1e-5


@pytest.mark.parametrize("grids", [((4, 8, 8),), ((2, 10, 6), (1, 4, 4)), ((1, 20, 12),), ((3, 4, 12), (2, 8, 8))])
@pytest.mark.parametrize("window", [112, 56])
def test_vision_equals_hugging_face(tiny: Any, grids: tuple[tuple[int, int, int], ...], window: int) -> None:
    model = tiny.model(window=window)
    rows = sum(t * h * w for t, h, w in grids)
    patches = torch.randn(rows, 1176, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = model.model.visual(patches, grid_thw=torch.tensor(grids)).pooler_output
        ours = vision.encode(model_weights(model), patches, grids).rows
    assert (ours - expected).abs().max() < 1e-5


def test_supervised_loss_is_the_mean_over_target_tokens(tiny: Any) -> None:
    model = tiny.model(torch.float64, window=56)
    split = SplitModel(model_weights(model))
    prompts = [tiny.prompt(1, VIDEO_GRIDS), tiny.prompt(2, [], words=20), tiny.prompt(3, [(1, 4, 6), (2, 4, 4)])]
    targets = tiny.responses(5, [6, 2, 1])
    loss = split.supervised_loss(prompts, targets)
    loss.backward()
    batch = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    logprobs = torch.cat([split.full_logprobs(p, t) for p, t in zip(prompts, targets, strict=True)])
    expected = -logprobs.mean()
    expected.backward()
    assert abs(loss.item() - expected.item()) < 1e-12
    for name, param in model.named_parameters():
        assert (batch[name] - param.grad).abs().max() < 1e-12, name
    with pytest.raises(ValueError, match="at least one token"):
        split.supervised_loss(prompts[:1], [[]])


def test_fused_neighbours_change_nothing_but_rounding(tiny: Any) -> None:
    model = tiny.model(torch.float64)
    prompt, _, packed = group(tiny, VIDEO_GRIDS, [4, 2])
    logprobs, expected = split_gradients(model, prompt, packed, "keep")
    for layer in model.model.language_model.layers:
        _make_neighbours([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj])
        _make_neighbours([layer.mlp.gate_proj, layer.mlp.up_proj])
    weights = model_weights(model)
    assert all(layer.qkv.weight is not None and layer.gate_up.weight is not None for layer in weights.layers)
    fused_logprobs, fused = split_gradients(model, prompt, packed, "keep")
    assert (fused_logprobs - logprobs).abs().max() < 1e-12
    assert all((fused[name] - expected[name]).abs().max() < 1e-12 for name in expected)


def _make_neighbours(modules: list[Any]) -> None:
    for attribute in ("weight", "bias"):
        params = [getattr(module, attribute) for module in modules]
        if params[0] is None:
            continue
        joined = torch.cat([p.data for p in params])
        for param, view in zip(params, joined.split([len(p) for p in params]), strict=True):
            param.data = view


def test_bfloat16_stays_near_float32(tiny: Any) -> None:
    prompt, _, packed = group(tiny, VIDEO_GRIDS, [4, 2])
    exact, _ = split_gradients(tiny.model(), prompt, packed, "keep")
    rounded, gradients = split_gradients(tiny.model(torch.bfloat16), prompt, packed, "host")
    assert rounded.dtype == torch.float32
    assert all(gradient.dtype == torch.bfloat16 for gradient in gradients.values())
    assert (rounded - exact).abs().max() < 0.5
