"""A frozen vision tower: untouched itself, and the rest trains as if it were not."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from rollplex_cli.engines.trainer.actor import Actor, is_vision
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.rl.losses import LossSettings, policy_loss
from rollplex_cli.rl.packing import pack_suffix

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# No clipping: the norm is of all gradients, and there are fewer.
SETTINGS = AdamWSettings(lr=1e-3, clip_norm=1e9)


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(tiny: Any, mode: Any, freeze: bool) -> tuple[Any, Actor]:
    """One update on a video prompt and a text prompt."""
    model = tiny.model()
    actor = Actor(model, optimizer=SETTINGS, prefix_activations=mode, freeze_vision=freeze)
    for seed, grids in ((1, [(2, 4, 4), (1, 4, 8)]), (2, [])):
        prompt, responses = tiny.prompt(seed, grids), tiny.responses(seed, [3, 2])
        packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
        state = actor.prefix(prompt)
        actor.suffix(
            state,
            packed,
            lambda lp, n=packed.lengths: policy_loss(lp, None, torch.tensor([1.0, -0.5]), None, n, LossSettings()),
        )
        actor.prefix_backward(state)
    actor.update(0.1)
    return model, actor


@pytest.mark.usefixtures("process_group")
def test_the_rest_trains_as_before(tiny: Any) -> None:
    before = {name: p.detach().clone() for name, p in tiny.model().named_parameters()}
    free, actor = trained(tiny, "recompute", False)
    expected = {name: p.detach().clone() for name, p in free.named_parameters()}
    actor.close()
    for mode in ("keep", "device", "host", "recompute"):
        frozen, actor = trained(tiny, mode, True)
        for name, value in frozen.named_parameters():
            wanted = before[name] if is_vision(name) else expected[name]
            assert torch.equal(value, wanted), (mode, name)
        assert not any(is_vision(name) for name in actor.named_parameters())
        assert not any(is_vision(name) for name in actor.state_dict())
        actor.close()
    assert any(is_vision(name) and not torch.equal(before[name], expected[name]) for name in before)


@pytest.mark.usefixtures("process_group")
def test_resuming_needs_no_state_of_what_is_frozen(tiny: Any) -> None:
    model, actor = trained(tiny, "recompute", True)
    saved = actor.state_dict()
    actor.close()
    again = Actor(tiny.model(seed=5), optimizer=dataclasses.replace(SETTINGS), freeze_vision=True)
    again.load_state_dict(saved)
    restored = again.named_parameters()
    assert all(torch.equal(restored[n], p) for n, p in model.named_parameters() if not is_vision(n))
    again.close()
