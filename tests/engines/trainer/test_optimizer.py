"""The chunked host optimizer against PyTorch's, and its independence of chunks."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.core.errors import NonFiniteError, RunFailedError
from rollplex_cli.engines.trainer.arena import GradientArena
from rollplex_cli.engines.trainer.optimizer import AdamWSettings, HostAdamW, write_elements

SHAPES = {"w1": (40, 13), "b1": (13,), "w2": (5, 67, 3), "norm": (200,), "w3": (1, 1)}


def make_params(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for n, s in SHAPES.items()}


def fill_gradients(params: dict[str, torch.nn.Parameter], step: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for param in params.values():
        assert param.grad is not None
        param.grad.copy_(torch.randn(param.shape, generator=generator) * size)


def run(params: dict[str, torch.nn.Parameter], options: AdamWSettings, steps: int = 4) -> HostAdamW:
    arena = GradientArena(params)
    optimizer = HostAdamW(params, arena, options)
    for step in range(steps):
        fill_gradients(params, step)
        optimizer.step()
    return optimizer


@settings(deadline=None, max_examples=40)
@given(
    chunk=st.integers(1, 30), decay=st.sampled_from([0.0, 0.1]), dtype=st.sampled_from([torch.float32, torch.bfloat16])
)
def test_results_do_not_depend_on_the_chunk(chunk: int, decay: float, dtype: torch.dtype) -> None:
    whole, cut = make_params(dtype), make_params(dtype)
    options = {"lr": 0.01, "weight_decay": decay, "clip_norm": 3.0, "warmup_steps": 3}
    first = run(whole, AdamWSettings(**options)).state_dict()
    second = run(cut, AdamWSettings(**options, chunk_elements=64 * chunk)).state_dict()
    assert all(torch.equal(whole[name], cut[name]) for name in whole)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("clip", [1e9, 0.7])
def test_equals_torch_adamw_with_clipping(clip: float) -> None:
    ours, theirs = make_params(), make_params()
    run(ours, AdamWSettings(lr=0.02, betas=(0.9, 0.95), weight_decay=0.1, clip_norm=clip, chunk_elements=128), steps=5)
    groups = [
        {"params": [p for p in theirs.values() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in theirs.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8)
    for step in range(5):
        for param in theirs.values():
            param.grad = torch.zeros_like(param)
        fill_gradients(theirs, step)
        torch.nn.utils.clip_grad_norm_(list(theirs.values()), clip)
        reference.step()
    for name, param in ours.items():
        assert torch.allclose(param, theirs[name], atol=1e-6, rtol=1e-6), name


def test_first_update_by_hand() -> None:
    """m = 0.1 g, v = 0.05 g^2, both bias-corrected to g and g^2: the step is lr * sign(g)."""
    params = {"b": torch.nn.Parameter(torch.tensor([1.0, 2.0]))}
    arena = GradientArena(params)
    optimizer = HostAdamW(params, arena, AdamWSettings(lr=0.5, clip_norm=100.0, warmup_steps=5))
    arena.flat[:2] = torch.tensor([3.0, -4.0])
    optimizer.step()
    assert optimizer.grad_norm == 5.0
    # Warm-up: a fifth of the rate.
    assert torch.allclose(params["b"], torch.tensor([0.9, 2.1]), atol=1e-6)
    state = optimizer.state_dict()
    assert torch.allclose(state["exp_avg/b"], torch.tensor([0.3, -0.4]))
    assert torch.allclose(state["exp_avg_sq/b"], torch.tensor([0.45, 0.8]))
    assert optimizer.lr == pytest.approx(0.2) and optimizer.param_groups[0]["lr"] == optimizer.lr


def test_learning_rate_warms_up_linearly() -> None:
    options = AdamWSettings(lr=1.0, warmup_steps=4)
    assert [options.learning_rate(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert AdamWSettings(lr=1.0).learning_rate(0) == 1.0


def test_masters_keep_what_bfloat16_loses() -> None:
    params = make_params(torch.bfloat16)
    start = {name: param.detach().clone() for name, param in params.items()}
    optimizer = run(params, AdamWSettings(lr=1e-5), steps=3)
    state = optimizer.state_dict()
    assert any(torch.equal(params[name], start[name]) for name in params)
    for name in params:
        assert not torch.equal(state[f"master/{name}"], start[name].float())
        assert torch.equal(params[name], state[f"master/{name}"].bfloat16())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    params = make_params()
    optimizer = HostAdamW(params, GradientArena(params), AdamWSettings(lr=0.1))
    before = optimizer.state_dict()
    fill_gradients(params, 0)
    assert params["w2"].grad is not None
    params["w2"].grad[0, 0, 0] = bad
    with pytest.raises(NonFiniteError, match="gradient norm of update 1"):
        optimizer.step()
    after = optimizer.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_resume_is_bit_equal_and_rewrites_parameters() -> None:
    options = AdamWSettings(lr=0.01, warmup_steps=5, weight_decay=0.1)
    straight = make_params(torch.bfloat16)
    run(straight, options, steps=4)
    half = make_params(torch.bfloat16)
    state = run(half, options, steps=2).state_dict()
    resumed = make_params(torch.bfloat16, seed=5)
    optimizer = HostAdamW(resumed, GradientArena(resumed), options)
    optimizer.load_state_dict(state)
    assert all(torch.equal(resumed[name], half[name]) for name in half)
    for step in (2, 3):
        fill_gradients(resumed, step)
        optimizer.step()
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


def test_a_foreign_checkpoint_is_refused_whole() -> None:
    params = make_params()
    optimizer = run(params, AdamWSettings(lr=0.01), steps=1)
    state = optimizer.state_dict()
    state["master/w1"] = torch.zeros(2)
    del state["exp_avg/b1"]
    before = optimizer.state_dict()
    with pytest.raises(RunFailedError, match=r"exp_avg/b1.*master/w1"):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_strided_writes_touch_their_elements_only(data: st.DataObject) -> None:
    rows, columns = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
    home = torch.full((rows, columns + 5), -1.0)
    target = home[:, 2 : 2 + columns]
    first = data.draw(st.integers(0, rows * columns - 1))
    count = data.draw(st.integers(1, rows * columns - first))
    write_elements(target, first, torch.arange(count, dtype=torch.float32))
    expected = torch.full((rows * columns,), -1.0)
    expected[first : first + count] = torch.arange(count, dtype=torch.float32)
    assert target.flatten().tolist() == expected.tolist()
    assert (home[:, :2] == -1).all() and (home[:, 2 + columns :] == -1).all()


def test_a_strided_parameter_trains_like_a_contiguous_one() -> None:
    home = torch.full((40, 20), 7.0)
    plain, strided = make_params(), make_params()
    home[:, 3:16] = strided["w1"].detach()
    strided["w1"] = torch.nn.Parameter(home[:, 3:16])
    run(plain, AdamWSettings(lr=0.01, chunk_elements=64))
    run(strided, AdamWSettings(lr=0.01, chunk_elements=64))
    assert torch.equal(plain["w1"], strided["w1"])
    assert strided["w1"].data_ptr() == home[:, 3:].data_ptr()
    assert (home[:, :3] == 7).all() and (home[:, 16:] == 7).all()


def test_chunks_must_be_aligned() -> None:
    params = make_params()
    with pytest.raises(ValueError, match="multiple of 64"):
        HostAdamW(params, GradientArena(params), AdamWSettings(lr=0.1, chunk_elements=100))
