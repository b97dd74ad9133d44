"""A handful of parameters of awkward sizes, and gradients for them."""

from __future__ import annotations

from typing import Any

import torch

from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.engines.trainer.adamw.streaming import StreamingAdamW
from rollplex_cli.engines.trainer.arena import GradientArena

SHAPES = {"w1": (40, 13), "b1": (13,), "w2": (5, 67, 3), "norm": (200,), "w3": (1, 1)}


def make_params(
    dtype: torch.dtype = torch.float32, seed: int = 0, *, strided: bool = False
) -> dict[str, torch.nn.Parameter]:
    """Random parameters; `strided` makes w1 a column range of a wider matrix full of sevens."""
    generator = torch.Generator().manual_seed(seed)
    values = {n: torch.randn(s, generator=generator).to(dtype) for n, s in SHAPES.items()}
    if strided:
        home = torch.full((40, 20), 7.0, dtype=dtype)
        home[:, 3:16] = values["w1"]
        values["w1"] = home[:, 3:16]
    return {name: torch.nn.Parameter(value) for name, value in values.items()}


def fill_gradients(params: dict[str, torch.nn.Parameter], step: int, size: float = 1.0) -> None:
    """The same gradients for the same step."""
    generator = torch.Generator().manual_seed(100 + step)
    for param in params.values():
        assert param.grad is not None
        param.grad.copy_(torch.randn(param.shape, generator=generator) * size)


def run(params: dict[str, torch.nn.Parameter], options: AdamWSettings, steps: int = 4, **more: Any) -> StreamingAdamW:
    """An optimizer that has done `steps` updates."""
    optimizer = StreamingAdamW(params, GradientArena(params), options, **more)
    for step in range(steps):
        fill_gradients(params, step)
        optimizer.step()
    return optimizer
