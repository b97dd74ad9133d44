"""The chunked host optimizer against PyTorch's, and its independence of chunks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engines.trainer.adamw.small import fill_gradients, make_params, run
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.core.errors import DoesNotFitError, NonFiniteError, RunFailedError
from rollplex_cli.engines.trainer.adamw.pipeline import staging_bytes
from rollplex_cli.engines.trainer.adamw.ranges import DataParallel
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.engines.trainer.adamw.streaming import StreamingAdamW
from rollplex_cli.engines.trainer.arena import GradientArena
from rollplex_cli.engines.weights.rounding import rounded
from rollplex_cli.memory.pinned import HostMemory
from rollplex_cli.memory.vmm import open_driver


@settings(deadline=None, max_examples=60)
@given(
    chunk=st.integers(1, 30),
    decay=st.sampled_from([0.0, 0.1]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    master=st.sampled_from(["full", "split"]),
    staged=st.booleans(),
    strided=st.booleans(),
)
def test_results_depend_on_neither_chunks_nor_masters_nor_staging(
    chunk: int, decay: float, dtype: torch.dtype, master: Any, staged: bool, strided: bool
) -> None:
    """The whole state in one chunk, updated where it lies, against everything else."""
    if dtype == torch.float32:
        master = "full"
    whole, cut = make_params(dtype), make_params(dtype, strided=strided)
    options = {"lr": 0.01, "weight_decay": decay, "clip_norm": 3.0, "warmup_steps": 3}
    first = run(whole, AdamWSettings(**options)).state_dict()
    settings = AdamWSettings(**options, chunk_elements=64 * chunk, master=master)
    second = run(cut, settings, staged=staged).state_dict()
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
    optimizer = StreamingAdamW(params, arena, AdamWSettings(lr=0.5, clip_norm=100.0, warmup_steps=5))
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
        assert torch.equal(params[name], rounded(state[f"master/{name}"], torch.bfloat16))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    params = make_params()
    optimizer = StreamingAdamW(params, GradientArena(params), AdamWSettings(lr=0.1))
    before = optimizer.state_dict()
    fill_gradients(params, 0)
    assert params["w2"].grad is not None
    params["w2"].grad[0, 0, 0] = bad
    with pytest.raises(NonFiniteError, match="gradient norm of update 1"):
        optimizer.step()
    after = optimizer.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("written", "read"), [("full", "full"), ("split", "split"), ("full", "split"), ("split", "full")]
)
def test_resume_is_bit_equal_and_rewrites_parameters(written: Any, read: Any) -> None:
    options = {"lr": 0.01, "warmup_steps": 5, "weight_decay": 0.1, "chunk_elements": 256}
    straight = make_params(torch.bfloat16)
    run(straight, AdamWSettings(**options), steps=4)
    half = make_params(torch.bfloat16)
    state = run(half, AdamWSettings(**options, master=written), steps=2).state_dict()
    resumed = make_params(torch.bfloat16, seed=5)
    optimizer = StreamingAdamW(resumed, GradientArena(resumed), AdamWSettings(**options, master=read))
    optimizer.load_state_dict(state)
    assert all(torch.equal(resumed[name], half[name]) for name in half)
    for step in (2, 3):
        fill_gradients(resumed, step)
        optimizer.step()
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


def test_split_masters_equal_full_ones_over_many_updates() -> None:
    """Steps of very different sizes: from far below half a step of BF16 to several powers of two."""
    full, split = make_params(torch.bfloat16), make_params(torch.bfloat16)
    with torch.no_grad():
        for params in (full, split):
            params["norm"][:8] = torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3e38, -3e38, 2.0**-126, 1.0])
    first = StreamingAdamW(full, GradientArena(full), AdamWSettings(lr=1e-3, warmup_steps=150, master="full"))
    second = StreamingAdamW(split, GradientArena(split), AdamWSettings(lr=1e-3, warmup_steps=150, master="split"))
    changed = 0
    for step in range(200):
        before = full["w2"].detach().clone()
        for params, optimizer in ((full, first), (split, second)):
            fill_gradients(params, step, size=10.0 ** (step % 7 - 3))
            optimizer.step()
        changed += int((full["w2"] != before).sum())
        assert all(torch.equal(full[name], split[name]) for name in full), step
    assert changed > 1000
    mine, theirs = first.state_dict(), second.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert second.host_bytes * 12 == first.host_bytes * 10


def test_split_needs_weights_that_lack_bits() -> None:
    params = make_params()
    with pytest.raises(ValueError, match="their own masters"):
        StreamingAdamW(params, GradientArena(params), AdamWSettings(lr=0.1, master="split"))


def test_what_an_update_moves_and_holds() -> None:
    """12 bytes a parameter each way, 10 under `split`; staging does not grow with the parameters."""
    sizes = {}
    for master, element_bytes in (("full", 12), ("split", 10)):
        for copies in (1, 5):
            params = {f"{name}{i}": p for i in range(copies) for name, p in make_params(torch.bfloat16).items()}
            options = AdamWSettings(lr=0.1, chunk_elements=128, master=master)  # type: ignore[arg-type]
            optimizer = run(params, options, steps=1, staged=True)
            stats = optimizer.stats
            assert stats is not None and stats.elements == optimizer._layout.size
            assert stats.to_device_bytes == stats.to_host_bytes == element_bytes * stats.elements
            assert optimizer.host_bytes == element_bytes * stats.elements
            assert stats.seconds > 0 and stats.exchanged_bytes == 0
            sizes.setdefault(master, set()).add(stats.staging_bytes)
    assert sizes == {master: {staging_bytes(128, mode=master)} for master in ("full", "split")}  # type: ignore[arg-type]
    # Three slots and the rounded weights with their mark of NaN; under `split` the masters of one chunk.
    assert staging_bytes(1 << 20) == (3 * 12 + 2 + 1) << 20
    assert staging_bytes(1 << 20, mode="split") == (3 * 10 + 2 + 1 + 4) << 20
    unstaged = run(make_params(), AdamWSettings(lr=0.1), steps=1).stats
    assert unstaged is not None and unstaged.to_device_bytes == unstaged.staging_bytes == 0


def test_staging_comes_from_whoever_has_it() -> None:
    asked: list[int] = []
    memory = torch.zeros(1 << 16, dtype=torch.uint8)

    def give(num_bytes: int) -> torch.Tensor:
        asked.append(num_bytes)
        return memory

    theirs, own = make_params(torch.bfloat16), make_params(torch.bfloat16)
    optimizer = run(theirs, AdamWSettings(lr=0.1, chunk_elements=128), staging=give, steps=2)
    run(own, AdamWSettings(lr=0.1), steps=2)
    assert asked == [optimizer.staging_bytes] * 2 and memory.any()
    assert all(torch.equal(theirs[name], own[name]) for name in own)


def test_host_memory_is_counted_and_given_back() -> None:
    memory = HostMemory(open_driver("cpu"), 1 << 20)
    params = make_params(torch.bfloat16)
    optimizer = run(params, AdamWSettings(lr=0.1), host=memory, steps=2)
    expected = make_params(torch.bfloat16)
    run(expected, AdamWSettings(lr=0.1), steps=2)
    assert all(torch.equal(params[name], expected[name]) for name in params)
    assert set(memory.holders()) == {"optimizer masters", "optimizer first moments", "optimizer second moments"}
    assert memory.held_bytes == optimizer.host_bytes
    optimizer.close()
    assert memory.held_bytes == 0


def test_too_little_host_memory_is_said_with_the_numbers() -> None:
    params = make_params(torch.bfloat16)
    with pytest.raises(DoesNotFitError, match=r"optimizer second moments.*optimizer masters") as caught:
        StreamingAdamW(params, GradientArena(params), AdamWSettings(lr=0.1), host=HostMemory(open_driver("cpu"), 20000))
    assert caught.value.exit_code == 3 and "memory.host_budget_gib" in str(caught.value.hint)


@settings(deadline=None, max_examples=30)
@given(ranks=st.integers(1, 5), master=st.sampled_from(["full", "split"]))
def test_shares_together_are_every_parameter_once(ranks: int, master: Any) -> None:
    params = make_params(torch.bfloat16)
    seen = {name: torch.zeros(param.shape, dtype=torch.int64) for name, param in params.items()}
    for rank in range(ranks):
        share = DataParallel(ranks, rank)
        optimizer = StreamingAdamW(
            params, GradientArena(params), AdamWSettings(lr=1, master=master), data_parallel=share
        )
        for part, name, box, values in optimizer.parts():
            assert values.dtype == torch.float32 and values.shape == box.shape
            if part == "master":
                seen[name][box.slices()] += 1
                assert torch.equal(values, params[name].detach()[box.slices()].float())
    assert all((count == 1).all() for count in seen.values())


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


def test_a_strided_parameter_keeps_its_neighbours() -> None:
    params = make_params(torch.bfloat16, strided=True)
    place = params["w1"].data_ptr()
    run(params, AdamWSettings(lr=0.01, chunk_elements=64, master="split"))
    home = params["w1"].detach().as_strided((40, 20), (20, 1), 0)
    assert params["w1"].data_ptr() == place
    assert (home[:, :3] == 7).all() and (home[:, 16:] == 7).all()


def test_chunks_must_be_aligned() -> None:
    params = make_params()
    with pytest.raises(ValueError, match="multiple of 64"):
        StreamingAdamW(params, GradientArena(params), AdamWSettings(lr=0.1, chunk_elements=100))
