"""Adapters beside frozen weights: the values, the gradients and the training of the model they would merge to."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from rollplex_cli.engines.lora.adapters import LoraSettings, attach_adapters
from rollplex_cli.engines.reference.reference import Reference
from rollplex_cli.engines.trainer.actor import Actor
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.trainer.split import SplitModel
from rollplex_cli.engines.weights.names import ADAPTED_MODULES, is_adapter
from rollplex_cli.rl.losses import LossSettings, policy_loss
from rollplex_cli.rl.packing import pack_suffix

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ALL = tuple(ADAPTED_MODULES)
GRIDS = [(2, 4, 4), (1, 4, 8)]
MODES = ("keep", "device", "host", "recompute")


def settings(targets: tuple[str, ...] = ALL) -> LoraSettings:
    return LoraSettings(rank=3, alpha=6.0, targets=targets)


def adapted(tiny: Any, lora: LoraSettings, dtype: torch.dtype = torch.float64) -> Any:
    """A model whose adapters are far from zero, everything else frozen."""
    model = tiny.model(dtype)
    attach_adapters(model, lora)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.requires_grad_(is_adapter(name))
            if is_adapter(name):
                param.copy_(torch.randn(param.shape, generator=generator) * 0.2)
    return model


def merged(tiny: Any, model: Any, lora: LoraSettings) -> Any:
    """A plain model with W + scale B A."""
    plain = tiny.model(model.dtype)
    factors = dict(model.named_parameters())
    with torch.no_grad():
        for name, param in plain.named_parameters():
            stem = name.removesuffix(".weight")
            if f"{stem}.lora_A.weight" in factors:
                param += lora.scale * factors[f"{stem}.lora_B.weight"] @ factors[f"{stem}.lora_A.weight"]
    return plain


def backward(split: SplitModel, tiny: Any, mode: Any, grids: list[tuple[int, int, int]]) -> torch.Tensor:
    """Both backwards of one group under a weighted sum of log-probs; the log-probs."""
    prompt, responses = tiny.prompt(3, grids), tiny.responses(3, [3, 1, 4])
    packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
    state = split.prefix(prompt, mode)
    with torch.enable_grad():
        logprobs = split.suffix(state, packed)
    (logprobs * torch.linspace(-1.0, 2.0, len(logprobs), dtype=logprobs.dtype)).mean().backward()
    split.prefix_backward(state)
    return logprobs.detach()


@pytest.mark.parametrize("targets", [ALL, ("q_proj", "v_proj"), ("q_proj",), ("up_proj", "down_proj"), ("k_proj",)])
@pytest.mark.parametrize("grids", [GRIDS, []])
def test_gradients_are_those_of_the_merged_model(tiny: Any, targets: tuple[str, ...], grids: Any) -> None:
    """d B = scale d W A^T and d A = scale B^T d W, with d W the full gradient of the merged model."""
    lora = settings(targets)
    model = adapted(tiny, lora)
    full = merged(tiny, model, lora)
    expected = backward(SplitModel(model_weights(full)), tiny, "keep", grids)
    wanted = dict(full.named_parameters())
    first: dict[str, torch.Tensor] = {}
    for mode, kept in zip(MODES, (None, 1, 1, 0), strict=True):
        model.zero_grad()
        split = SplitModel(model_weights(model, lora=lora), freeze_vision=True, suffix_kept_layers=kept)
        assert (backward(split, tiny, mode, grids) - expected).abs().max() < 1e-12
        factors = dict(model.named_parameters())
        for stem in [n.removesuffix(".lora_A.weight") for n in factors if n.endswith("lora_A.weight")]:
            a, b = factors[f"{stem}.lora_A.weight"], factors[f"{stem}.lora_B.weight"]
            grad = wanted[f"{stem}.weight"].grad
            assert grad is not None and grad.abs().max() > 1e-6, stem
            assert a.grad is not None and b.grad is not None
            assert (b.grad - lora.scale * grad @ a.T).abs().max() < 1e-12, stem
            assert (a.grad - lora.scale * b.T @ grad).abs().max() < 1e-12, stem
        assert all(p.grad is None for n, p in factors.items() if not is_adapter(n))
        grads = {n: p.grad.clone() for n, p in factors.items() if p.grad is not None}
        first = first or grads
        assert all(torch.equal(first[n], grads[n]) for n in first), mode  # the modes agree to the bit


def test_the_base_is_the_reference(tiny: Any) -> None:
    lora = settings()
    model = adapted(tiny, lora, torch.float32)
    prompt, responses = tiny.prompt(2, [(2, 4, 8)]), tiny.responses(2, [4, 1, 3])
    packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
    plain, shared = Reference(tiny.model()), Reference(model)
    expected = plain.suffix(plain.prefix(prompt), packed)
    assert torch.equal(shared.suffix(shared.prefix(prompt), packed), expected)
    policy = SplitModel(model_weights(model, lora=lora))
    assert (policy.suffix(policy.prefix(prompt, "none"), packed) - expected).abs().max() > 0.01
    assert all(p.requires_grad == is_adapter(n) for n, p in model.named_parameters())


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(tiny: Any, model: Any, lora: LoraSettings | None, updates: int) -> tuple[Actor, list[float]]:
    """An actor after some updates on one group, and the log-probs' sum before each."""
    actor = Actor(model, optimizer=AdamWSettings(lr=1e-2, clip_norm=1e9), prefix_activations="recompute", lora=lora)
    sums = []
    for _ in range(updates):
        prompt, responses = tiny.prompt(1, GRIDS), tiny.responses(1, [3, 2])
        packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
        state = actor.prefix(prompt)
        advantages = torch.tensor([1.0, 1.0])
        outcome = actor.suffix(
            state, packed, lambda lp, n=packed.lengths, a=advantages: policy_loss(lp, None, a, None, n, LossSettings())
        )
        actor.prefix_backward(state)
        actor.update(1 / packed.num_tokens)
        sums.append(float(outcome.logprobs.sum()))
    return actor, sums


@pytest.mark.usefixtures("process_group")
def test_only_adapters_are_trained_and_saved(tiny: Any) -> None:
    lora = settings()
    model = adapted(tiny, lora, torch.float32)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    actor, sums = trained(tiny, model, lora, 4)
    assert sums[-1] > sums[0] + 0.5  # it learns
    for name, param in model.named_parameters():
        assert torch.equal(param, before[name]) != is_adapter(name), name
    saved = copy.deepcopy(actor.state_dict())
    assert {n for n in saved if n != "updates"} == {
        f"{part}/{name}" for part in ("master", "exp_avg", "exp_avg_sq") for name in before if is_adapter(name)
    }
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    actor.close()
    other = adapted(tiny, lora, torch.float32)
    again, _ = trained(tiny, other, lora, 0)
    again.load_state_dict(saved)
    assert all(torch.equal(p, weights[name]) for name, p in other.named_parameters())
    again.close()
