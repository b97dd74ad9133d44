"""Prefixes of several prompts in one pass against the same one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollplex_cli.engines.trainer.actor import Actor
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.engines.trainer.model.attention import causal_runs, sdpa
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.trainer.prefix import PrefixInput
from rollplex_cli.engines.trainer.split import SplitModel
from rollplex_cli.rl.losses import LossSettings, policy_loss
from rollplex_cli.rl.packing import pack_suffix

GRIDS: list[list[tuple[int, int, int]]] = [[(4, 8, 8)], [], [(2, 8, 8), (3, 4, 12)]]
MODES = ("keep", "device", "host", "recompute")


def groups(tiny: Any) -> list[tuple[Any, Any]]:
    found = []
    for seed, grids in enumerate(GRIDS):
        prompt, responses = tiny.prompt(seed, grids), tiny.responses(seed, [3, 1, 4])
        packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
        found.append((prompt, packed))
    return found


def gradients(
    model: Any, tiny: Any, mode: Any, *, together: bool, order: tuple[int, ...] = (0, 1, 2), without: int | None = None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Log-probs by group and gradients of a loss of all of them but `without`."""
    split, given = SplitModel(model_weights(model)), groups(tiny)
    model.zero_grad(set_to_none=True)
    prompts = [prompt for prompt, _ in given]
    states = split.prefixes(prompts, mode) if together else [split.prefix(prompt, mode) for prompt in prompts]
    logprobs: dict[int, torch.Tensor] = {}
    for index in order:
        found = split.suffix(states[index], given[index][1])
        logprobs[index] = found.detach()
        if index == without:
            split.release(states[index])
            continue
        weights = torch.linspace(-1.0, 2.0 + index, len(found), dtype=found.dtype)
        (found * weights).mean().backward()
        split.prefix_backward(states[index])
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return [logprobs[index] for index in range(len(given))], grads


@pytest.mark.parametrize("mode", MODES)
def test_a_pass_of_several_prompts_gives_the_gradients_of_each(tiny: Any, mode: str) -> None:
    model = tiny.model(torch.float64, window=56, layers=3)
    logprobs, expected = gradients(model, tiny, mode, together=False)
    packed_logprobs, packed = gradients(model, tiny, mode, together=True)
    for one, other in zip(logprobs, packed_logprobs, strict=True):
        torch.testing.assert_close(other, one, rtol=0, atol=1e-12)
    assert set(packed) == set(expected)
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(packed[name], gradient, rtol=1e-11, atol=1e-12, msg=name)


def test_modes_are_bit_equal(tiny: Any) -> None:
    model = tiny.model(window=56, layers=3)
    logprobs, expected = gradients(model, tiny, "keep", together=True)
    for mode in MODES[1:]:
        other_logprobs, other = gradients(model, tiny, mode, together=True)
        assert all(torch.equal(a, b) for a, b in zip(logprobs, other_logprobs, strict=True))
        for name, gradient in expected.items():
            assert torch.equal(other[name], gradient), (mode, name)


@pytest.mark.parametrize("without", [0, 1, 2])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize("mode", ["keep", "device"])
def test_a_prompt_without_gradients(tiny: Any, mode: str, order: tuple[int, ...], without: int) -> None:
    """Wherever in the order it drops out, the others' gradients are all there."""
    model = tiny.model(torch.float64, window=56)
    _, expected = gradients(model, tiny, mode, together=False, order=order, without=without)
    _, packed = gradients(model, tiny, mode, together=True, order=order, without=without)
    for name, gradient in expected.items():
        torch.testing.assert_close(packed[name], gradient, rtol=1e-11, atol=1e-12, msg=name)


def test_the_backward_waits_for_the_last_and_frees_all(tiny: Any) -> None:
    model = tiny.model()
    split, given = SplitModel(model_weights(model)), groups(tiny)
    states = split.prefixes([prompt for prompt, _ in given], "device")
    pack, released = states[0].pack, []
    pack.on_release = lambda: released.append(True)
    for index, (_, packed) in enumerate(given):
        split.suffix(states[index], packed).sum().backward()
        before = model.model.visual.patch_embed.proj.weight.grad
        assert before is None and not released
        split.prefix_backward(states[index])
    assert model.model.visual.patch_embed.proj.weight.grad.abs().max() > 0
    assert released == [True] and pack.stage_inputs == [] and not pack.owes and not pack.is_open
    with pytest.raises(ValueError, match="ran twice"):
        split.prefix_backward(states[0])
    with pytest.raises(ValueError, match="already consumed"):
        split.suffix(states[1], given[1][1])


def test_a_pack_that_nobody_trains_is_released(tiny: Any) -> None:
    model = tiny.model()
    split, given = SplitModel(model_weights(model)), groups(tiny)
    states = split.prefixes([prompt for prompt, _ in given], "device")
    for state in states:
        split.release(state)
        split.release(state)  # again changes nothing
    assert states[0].pack.stage_inputs == []
    assert all(p.grad is None for p in model.parameters())


def test_faults(tiny: Any) -> None:
    split = SplitModel(model_weights(tiny.model()))
    prompts = [tiny.prompt(1, [], words=1), tiny.prompt(2, [])]
    with pytest.raises(ValueError, match="one token"):
        split.prefixes(prompts, "device")
    state = split.prefixes([tiny.prompt(2, []), tiny.prompt(3, [])], "device")[0]
    with pytest.raises(ValueError, match="no suffix backward"):
        split.prefix_backward(state)


def test_positions_and_media_are_laid_end_to_end(tiny: Any) -> None:
    prompts = [prompt for prompt, _ in groups(tiny)]
    together = PrefixInput.of(prompts)
    assert together.lengths == tuple(prompt.num_tokens - 1 for prompt in prompts)
    assert together.num_tokens == sum(together.lengths) == together.position_ids.shape[1]
    for first, last in together.media_spans:
        assert len(set(together.token_ids[first : last + 1])) == 1
    assert len(together.media) == len(together.media_spans) == 3


def test_runs_do_not_see_each_other() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 9, 8, generator=generator)
    k, v = (torch.randn(1, 2, 9, 8, generator=generator) for _ in range(2))
    out = causal_runs((4, 5), q.device, q.dtype)(q, k, v)
    for first, end in ((0, 4), (4, 9)):
        torch.testing.assert_close(
            out[:, first:end], sdpa(q[:, :, first:end], k[:, :, first:end], v[:, :, first:end], causal=True)
        )


@pytest.mark.gpu
def test_runs_on_a_gpu() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((1, 8, 70, 64), (1, 2, 70, 64), (1, 2, 70, 64))
    tensors = [torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16) for s in shapes]
    found, wanted = ([t.clone().requires_grad_() for t in tensors] for _ in range(2))
    out = causal_runs((33, 37), tensors[0].device, torch.bfloat16)(*found)
    pieces = [[t.float()[:, :, a:b] for t in wanted] for a, b in ((0, 33), (33, 70))]
    expected = torch.cat([sdpa(*piece, causal=True) for piece in pieces], dim=1)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    out.float().square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(found, wanted, strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad.float(), other.grad.float(), rtol=5e-2, atol=1e-1)


def test_an_update_takes_what_a_cancelled_group_held_back(tiny: Any, tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        norms = []
        for together in (True, False):
            actor = Actor(tiny.model(), optimizer=AdamWSettings(lr=1e-3), prefix_activations="device")
            given = groups(tiny)
            prompts = [prompt for prompt, _ in given]
            states = actor.prefixes(prompts) if together else [actor.prefix(prompt) for prompt in prompts]
            for index in (0, 1):  # the last is never heard of again
                packed = given[index][1]
                advantages = torch.tensor([1.0, -0.5, 0.25])

                def loss(logprobs: torch.Tensor, packed: Any = packed, advantages: Any = advantages) -> Any:
                    return policy_loss(logprobs, None, advantages, None, packed.lengths, LossSettings())

                actor.suffix(states[index], packed, loss)
                actor.prefix_backward(states[index])
            norms.append(actor.update(1.0).grad_norm)
            actor.close()
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    finally:
        dist.destroy_process_group()
