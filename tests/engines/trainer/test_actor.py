"""The actor in one process with the real DeepSpeed engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollplex_cli.core.errors import NonFiniteError
from rollplex_cli.engines.trainer.actor import Actor
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.engines.trainer.prefix import PrefixMode
from rollplex_cli.rl.losses import LossResult, LossSettings, policy_loss
from rollplex_cli.rl.packing import PackedSuffix, pack_suffix

SETTINGS = AdamWSettings(lr=1e-3, warmup_steps=2, weight_decay=0.01)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def group(tiny: Any, seed: int) -> tuple[Any, PackedSuffix]:
    prompt, responses = tiny.prompt(seed, [(1, 4, 4)]), tiny.responses(seed, [3, 1, 4])
    return prompt, pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)


def loss_of(packed: PackedSuffix) -> Any:
    advantages = torch.tensor([1.0, -0.5, 0.25])
    return lambda logprobs: policy_loss(logprobs, None, advantages, None, packed.lengths, LossSettings())


def train_step(actor: Actor, tiny: Any, step: int) -> float:
    tokens = 0
    for seed in (2 * step, 2 * step + 1):
        prompt, packed = group(tiny, seed)
        state = actor.prefix(prompt)
        tokens += actor.suffix(state, packed, loss_of(packed)).weight
        actor.prefix_backward(state)
    return actor.update(1 / tokens).grad_norm


def parameters(actor: Actor) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in actor.named_parameters().items()}


@pytest.mark.usefixtures("process_group")
def test_modes_dtypes_and_repeats(tiny: Any) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for mode in ("keep", "device", "host", "recompute", "recompute"):
            actor = Actor(tiny.model(dtype), optimizer=SETTINGS, prefix_activations=mode)  # type: ignore[arg-type]
            norms = [train_step(actor, tiny, step) for step in range(2)]
            results.append((norms, parameters(actor), actor.state_dict()))
            actor.close()
        for norms, params, state in results[1:]:
            assert norms == results[0][0]
            assert all(torch.equal(params[name], value) for name, value in results[0][1].items())
            assert all(torch.equal(state[name], value) for name, value in results[0][2].items())


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("mode", ["keep", "device", "host"])
def test_prompts_beyond_the_limit_are_computed_again(tiny: Any, mode: PrefixMode) -> None:
    prompts = [group(tiny, seed) for seed in range(4)]
    first, second = (prompt.num_tokens for prompt, _ in prompts[:2])
    limit = first + second
    results = []
    for kept_tokens in (None, limit):
        actor = Actor(tiny.model(), optimizer=SETTINGS, prefix_activations=mode, prefix_kept_tokens=kept_tokens)
        for _ in range(2):
            states = [actor.prefix(prompt) for prompt, _ in prompts]
            if kept_tokens is not None:
                assert [state.mode for state in states] == [mode, mode, "recompute", "recompute"]
                # Room again once one of them is gone, however it went.
                states[0].release()
                assert actor.prefix(prompts[0][0]).mode == mode  # dropped: counts until the update
                assert actor.prefix(prompts[0][0]).mode == "recompute"
                states[0] = actor.prefix(prompts[0][0])
            for state, (_, packed) in zip(states, prompts, strict=True):
                actor.suffix(state, packed, loss_of(packed))
                actor.prefix_backward(state)
            actor.update(0.01)
        results.append(parameters(actor))
        actor.close()
    assert all(torch.equal(results[1][name], value) for name, value in results[0].items())


@pytest.mark.usefixtures("process_group")
def test_resume_is_bit_equal(tiny: Any) -> None:
    straight = Actor(tiny.model(), optimizer=SETTINGS)
    train_step(straight, tiny, 0)
    saved = straight.state_dict()
    norm = train_step(straight, tiny, 1)
    resumed = Actor(tiny.model(seed=7), optimizer=SETTINGS)
    prompt, packed = group(tiny, 9)
    resumed.suffix(resumed.prefix(prompt), packed, loss_of(packed))
    resumed.load_state_dict(saved)
    assert resumed.updates == 1
    assert train_step(resumed, tiny, 1) == norm
    expected = parameters(straight)
    assert all(torch.equal(expected[name], value) for name, value in parameters(resumed).items())


@pytest.mark.usefixtures("process_group")
def test_update_scales_the_sum_and_moves_the_policy(tiny: Any) -> None:
    """A positive advantage makes its response likelier; the norm grows with the scale."""
    norms = []
    for scale in (1.0, 0.25):
        actor = Actor(tiny.model(), optimizer=AdamWSettings(lr=1e-3))
        prompt, packed = group(tiny, 3)
        before = actor.split.suffix(actor.split.prefix(prompt, "none"), packed).detach()
        state = actor.prefix(prompt)
        outcome = actor.suffix(state, packed, lambda lp: LossResult(loss=-lp.sum(), weight=8, metrics={}))
        actor.prefix_backward(state)
        assert torch.allclose(outcome.logprobs, before, atol=1e-6)
        assert outcome.loss == pytest.approx(-float(before.sum()), rel=1e-5)
        update = actor.update(scale)
        assert update.applied and update.lr == 1e-3
        norms.append(update.grad_norm)
        after = actor.split.suffix(actor.split.prefix(prompt, "none"), packed)
        assert after.sum() > before.sum()
        # Nothing accumulated is left: a second update moves by momentum alone.
        assert actor.update(1.0).grad_norm == 0.0
    assert norms[1] == pytest.approx(norms[0] / 4, rel=1e-6)


@pytest.mark.usefixtures("process_group")
def test_not_finite_stops_before_anything_changes(tiny: Any) -> None:
    actor = Actor(tiny.model(), optimizer=SETTINGS)
    before = parameters(actor)
    prompt, packed = group(tiny, 3)
    state = actor.prefix(prompt)
    with pytest.raises(NonFiniteError, match="loss of a group"):
        actor.suffix(state, packed, lambda lp: LossResult(loss=lp.sum() * float("nan"), weight=1, metrics={}))
    actor.suffix(state, packed, lambda lp: LossResult(loss=lp.sum(), weight=1, metrics={}))
    with pytest.raises(NonFiniteError, match="gradient norm"):
        actor.update(float("inf"))
    assert all(torch.equal(before[name], value) for name, value in parameters(actor).items())
    actor.discard_gradients()
    assert actor.update(1.0).grad_norm == 0.0


@pytest.mark.usefixtures("process_group")
def test_global_random_state_is_left_alone(tiny: Any) -> None:
    model = tiny.model()
    state = torch.get_rng_state()
    train_step(Actor(model, optimizer=SETTINGS), tiny, 0)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_process_group_it_refuses(tiny: Any) -> None:
    with pytest.raises(ValueError, match="process group"):
        Actor(tiny.model(), optimizer=SETTINGS)
