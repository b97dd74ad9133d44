"""The flat layout and gradients that accumulate in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollplex_cli.core.names import TaskKey, TaskKind
from rollplex_cli.core.units import MIB
from rollplex_cli.engines.trainer.arena import ALIGNMENT, FlatLayout, GradientArena
from rollplex_cli.memory.manager import MemoryManager
from rollplex_cli.memory.residency import Residency
from rollplex_cli.memory.vmm.host import HostDriver
from rollplex_cli.runtime.assembly.build_memory import gradient_memory


def test_layout_separates_decay_and_aligns() -> None:
    params = {"a": torch.zeros(3, 5), "b": torch.zeros(7), "c": torch.zeros(64, 2)}
    layout = FlatLayout.of(params)
    assert [slot.name for slot in layout.slots] == ["a", "c", "b"]
    assert [slot.offset for slot in layout.slots] == [0, 64, 192]
    assert layout.decay_end == 192 and layout.size == 192 + ALIGNMENT
    flat = torch.arange(layout.size)
    assert layout.view(flat, layout.slots[0]).tolist() == torch.arange(15).view(3, 5).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_backward_accumulates_into_the_arena(dtype: torch.dtype) -> None:
    params = {
        "w": torch.nn.Parameter(torch.ones(3, 3, dtype=dtype)),
        "b": torch.nn.Parameter(torch.ones(3, dtype=dtype)),
    }
    arena = GradientArena(params)
    assert arena.flat.dtype == torch.promote_types(dtype, torch.float32)
    for _ in range(3):
        (params["w"].sum() * 2 + params["b"].sum()).backward()
    arena.check()
    assert arena.layout.view(arena.flat, arena.layout.slots[0]).unique().tolist() == [6.0]
    assert arena.norm() == pytest.approx((9 * 36 + 3 * 9) ** 0.5)
    arena.scale(0.5)
    assert params["b"].grad is not None and params["b"].grad.tolist() == [1.5] * 3
    arena.zero()
    assert not arena.flat.any()


def test_small_gradients_survive_in_float32() -> None:
    """256 steps of 1 onto 256 are lost in bfloat16, whose integers end there."""
    param = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    arena = GradientArena({"w": param})
    for _ in range(512):
        param.sum().backward()
    assert arena.flat[0] == 512


def test_a_replaced_gradient_is_noticed() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    arena = GradientArena({"w": param})
    param.grad = torch.zeros(4)
    with pytest.raises(AssertionError, match="w"):
        arena.check()


def test_model_gradients_stay_in_the_arena_in_bfloat16(tiny: Any) -> None:
    from rollplex_cli.engines.trainer.model.families.gather import model_weights
    from rollplex_cli.engines.trainer.split import SplitModel

    model = tiny.model(torch.bfloat16)
    arena = GradientArena(dict(model.named_parameters()))
    SplitModel(model_weights(model)).full_logprobs(tiny.prompt(1, [(1, 4, 4)]), [3, 4]).sum().backward()
    arena.check()
    assert all(arena.layout.view(arena.flat, slot).any() for slot in arena.layout.slots)


def test_an_arena_in_a_region_has_its_memory_and_its_zeros_from_task_to_task() -> None:
    residency = Residency(MemoryManager(HostDriver(MIB), budget_bytes=MIB, host_budget_bytes=0))
    params = {"w": torch.nn.Parameter(torch.ones(3, 3)), "b": torch.nn.Parameter(torch.ones(3))}
    arena = GradientArena(params, gradient_memory(residency))
    residency.rest("gradients")
    arena.zero()  # without memory there is nothing to do
    suffix, update = TaskKey(TaskKind.ACTOR_SUFFIX, 0), TaskKey(TaskKind.UPDATE)
    for _ in range(2):
        residency.expect([suffix, update])
        with residency.lease("gradients", suffix):
            (params["w"].sum() * 2 + params["b"].sum()).backward()
        with residency.lease("gradients", update):
            arena.check()
            assert arena.norm() == pytest.approx((9 * 4 + 3) ** 0.5)  # of this lifetime alone
        residency.end("gradients", update)
        assert residency.manager.usage().used_bytes == 0
    residency.close()
