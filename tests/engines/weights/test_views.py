"""Trainer parameters inside hand-made tensors in the rollout engine's layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.trainer.split import SplitModel
from rollplex_cli.engines.weights.names import is_padded_vision_mlp, rollout_location
from rollplex_cli.engines.weights.skeleton import build_skeleton
from rollplex_cli.engines.weights.views import bind_views, check_views


def rollout_tensors(model: Any, *, vision_width: int = 192, vocab_padding: int = 0) -> dict[str, torch.Tensor]:
    """What the rollout engine would hold after loading `model`, written out by hand."""
    text, visual = model.model.language_model, model.model.visual
    pad = vision_width - visual.blocks[0].mlp.gate_proj.weight.shape[0]

    def rows(*tensors: torch.Tensor) -> torch.Tensor:
        return torch.cat([t.detach() for t in tensors]).contiguous()

    def padded(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.detach(), tensor.new_zeros(pad, *tensor.shape[1:])])

    vocab = rows(text.embed_tokens.weight, text.embed_tokens.weight.new_zeros(vocab_padding, 128))
    tensors = {"model.embed_tokens.weight": vocab, "model.norm.weight": text.norm.weight.detach().clone()}
    if model.config.tie_word_embeddings:
        tensors["lm_head.weight"] = vocab
    else:
        tensors["lm_head.weight"] = model.lm_head.weight.detach().clone()
    for i, layer in enumerate(text.layers):
        base, attention, mlp = f"model.layers.{i}.", layer.self_attn, layer.mlp
        for kind in ("weight", "bias"):
            parts = [getattr(p, kind) for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
            tensors[base + f"self_attn.qkv_proj.{kind}"] = rows(*parts)
        tensors[base + "self_attn.o_proj.weight"] = attention.o_proj.weight.detach().clone()
        tensors[base + "mlp.gate_up_proj.weight"] = rows(mlp.gate_proj.weight, mlp.up_proj.weight)
        tensors[base + "mlp.down_proj.weight"] = mlp.down_proj.weight.detach().clone()
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[base + f"{norm}.weight"] = getattr(layer, norm).weight.detach().clone()
    for i, block in enumerate(visual.blocks):
        base, mlp = f"visual.blocks.{i}.", block.mlp
        for kind in ("weight", "bias"):
            tensors[base + f"attn.qkv_proj.{kind}"] = getattr(block.attn.qkv, kind).detach().clone()
            tensors[base + f"attn.proj.{kind}"] = getattr(block.attn.proj, kind).detach().clone()
            stacked = [padded(getattr(p, kind)) for p in (mlp.gate_proj, mlp.up_proj)]
            tensors[base + f"mlp.gate_up_proj.{kind}"] = rows(*stacked)
        down = mlp.down_proj.weight.detach()
        tensors[base + "mlp.down_proj.weight"] = torch.cat([down, down.new_zeros(len(down), pad)], dim=1)
        tensors[base + "mlp.down_proj.bias"] = mlp.down_proj.bias.detach().clone()
        for norm in ("norm1", "norm2"):
            tensors[base + f"{norm}.weight"] = getattr(block, norm).weight.detach().clone()
    tensors["visual.patch_embed.proj.weight"] = visual.patch_embed.proj.weight.detach().clone()
    tensors["visual.merger.ln_q.weight"] = visual.merger.ln_q.weight.detach().clone()
    for index in (0, 2):
        for kind in ("weight", "bias"):
            tensors[f"visual.merger.mlp.{index}.{kind}"] = getattr(visual.merger.mlp[index], kind).detach().clone()
    return tensors


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("width", [192, 190])
def test_a_bound_skeleton_computes_what_the_original_does(tiny: Any, tied: bool, width: int) -> None:
    original = tiny.model(tied=tied, intermediate=width)
    tensors = rollout_tensors(original, vocab_padding=64)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    skeleton = build_skeleton(original.config, torch.float32)
    table = bind_views(skeleton, tensors)
    prompt, (response,) = tiny.prompt(1, [(2, 4, 8)]), tiny.responses(1, [5])
    weights = model_weights(skeleton)
    assert all(layer.qkv.weight is not None and layer.gate_up.weight is not None for layer in weights.layers)
    assert all(block.mlp.gate_up.weight is not None for block in weights.vision.blocks)
    with torch.no_grad():
        ours = SplitModel(weights).full_logprobs(prompt, response)
        expected = SplitModel(model_weights(original)).full_logprobs(prompt, response)
    assert (ours - expected).abs().max() < 1e-5
    assert all(torch.equal(tensors[name], value) for name, value in before.items())
    totals = table.bytes_by_kind()
    assert totals["rebuilt"] == 0 and totals["identical"] > 0 and totals["view"] == 0
    assert sum(totals.values()) == sum(p.numel() * 4 for p in skeleton.parameters())
    assert (skeleton.lm_head.weight is skeleton.model.language_model.embed_tokens.weight) == tied


def test_writes_through_parameters_reach_the_rollout_and_back(tiny: Any) -> None:
    tensors = rollout_tensors(tiny.model())
    skeleton = build_skeleton(tiny.config(), torch.float32)
    table = bind_views(skeleton, tensors)
    with torch.no_grad():
        for index, param in enumerate(skeleton.parameters()):
            param.fill_(float(index))
    order = {name: float(i) for i, (name, _) in enumerate(skeleton.named_parameters())}
    qkv = tensors["model.layers.1.self_attn.qkv_proj.weight"]
    base = "model.language_model.layers.1.self_attn."
    expected = [order[base + "q_proj.weight"]] * 128
    expected += [order[base + "k_proj.weight"]] * 64 + [order[base + "v_proj.weight"]] * 64
    assert qkv[:, 0].tolist() == expected
    gate_up = tensors["visual.blocks.0.mlp.gate_up_proj.bias"]
    assert gate_up[0] == order["model.visual.blocks.0.mlp.gate_proj.bias"]
    assert gate_up[192] == order["model.visual.blocks.0.mlp.up_proj.bias"]
    tensors["model.norm.weight"].fill_(-1.0)
    assert skeleton.model.language_model.norm.weight[0] == -1.0
    check_views(skeleton, table, tensors)
    skeleton.model.language_model.norm.weight.data = torch.ones(128)
    with pytest.raises(AssertionError, match="norm"):
        check_views(skeleton, table, tensors)


def test_binding_keeps_parameter_objects_of_a_real_module(tiny: Any) -> None:
    model = tiny.model()
    objects = dict(model.named_parameters())
    bind_views(model, rollout_tensors(model))
    assert all(param is objects[name] for name, param in model.named_parameters())


def test_padded_columns_stay_zero_in_training(tiny: Any) -> None:
    original = tiny.model(intermediate=189)
    tensors = rollout_tensors(original)
    skeleton = build_skeleton(original.config, torch.float32)
    bind_views(skeleton, tensors)
    prompt, (response,) = tiny.prompt(1, [(2, 4, 8)]), tiny.responses(1, [5])
    SplitModel(model_weights(skeleton)).full_logprobs(prompt, response).sum().backward()
    for block in skeleton.model.visual.blocks:
        for grad in (block.mlp.gate_proj.weight.grad, block.mlp.up_proj.bias.grad, block.mlp.down_proj.weight.grad.t()):
            assert not grad[189:].any()
            assert grad[:189].any()


def test_every_misfit_is_named(tiny: Any) -> None:
    tensors = rollout_tensors(tiny.model())
    del tensors["model.layers.0.self_attn.o_proj.weight"]
    tensors["model.layers.7.extra.weight"] = torch.zeros(3)
    tensors["model.norm.weight"] = torch.zeros(64)
    tensors["visual.merger.ln_q.weight"] = torch.zeros(64, dtype=torch.float64)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(384, 128).t()
    skeleton = build_skeleton(tiny.config(), torch.float32)
    with pytest.raises(RunFailedError) as caught:
        bind_views(skeleton, tensors)
    for part in ("o_proj", "layers.7.extra", "model.norm.weight", "float64", "not contiguous"):
        assert part in str(caught.value)
    assert all(param.is_meta for param in skeleton.parameters())


def test_names_of_both_sides() -> None:
    assert rollout_location("model.visual.blocks.3.attn.qkv.bias").name == "visual.blocks.3.attn.qkv_proj.bias"
    assert rollout_location("model.language_model.layers.10.self_attn.v_proj.weight").part == 2
    assert rollout_location("model.language_model.embed_tokens.weight").name == "model.embed_tokens.weight"
    with pytest.raises(KeyError):
        rollout_location("transformer.h.0.weight")
    assert is_padded_vision_mlp("model.visual.blocks.0.mlp.up_proj.bias")
    assert is_padded_vision_mlp("model.visual.blocks.31.mlp.down_proj.weight")
    assert not is_padded_vision_mlp("model.visual.blocks.0.mlp.down_proj.bias")
    assert not is_padded_vision_mlp("model.language_model.layers.0.mlp.down_proj.weight")
