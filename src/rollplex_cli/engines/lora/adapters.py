"""LoRA adapters (Hu et al., 2021): what they are, where they hang, and their first values.

An adapted map computes x W^T + (alpha / rank) x A^T B^T, W frozen, in both engines: nothing is ever merged while a run
lasts. The factors lie in tensors of the rollout engine, stacked as its fused modules are, and the trainer's are views
of them, like any other weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rollplex_cli.core.seeds import derive_seed
from rollplex_cli.engines.weights.names import ADAPTED_MODULES, is_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rollplex_cli.engines.weights.shards import Box, Shape, ShardPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """The profile's `lora` section."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Keys of `ADAPTED_MODULES`."""

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return self.alpha / self.rank


def adapted_modules(hf_model: Any, lora: LoraSettings) -> list[str]:
    """Full names of the targeted modules of a Hugging Face model."""
    return [
        f"model.language_model.layers.{index}.{ADAPTED_MODULES[target][0]}.{target}"
        for index in range(len(hf_model.model.language_model.layers))
        for target in lora.targets
    ]


def attach_adapters(hf_model: Any, lora: LoraSettings) -> None:
    """Give the targeted modules `lora_A.weight` [rank, in] and `lora_B.weight` [out, rank], uninitialised, of their
    weight's type and device. The modules' own forward does not use them."""
    for name in adapted_modules(hf_model, lora):
        module = hf_model.get_submodule(name)
        out_features, in_features = module.weight.shape
        for factor, shape in (("lora_A", (lora.rank, in_features)), ("lora_B", (out_features, lora.rank))):
            holder = torch.nn.Module()
            holder.register_parameter("weight", torch.nn.Parameter(module.weight.new_empty(shape)))
            module.add_module(factor, holder)


class AdaptedReader:
    """First values of a model with adapters: A uniform in +-1 / sqrt(in) (as PEFT and `torch.nn.Linear` draw it) by
    seed and name, B zero, so that the policy begins as the base; everything else from `read`.

    Drawn on the host, whole, whatever part of it a rank holds: equal for every layout.
    """

    def __init__(self, read: Callable[[str, Box], torch.Tensor], plan: ShardPlan, seed: int) -> None:
        self._read, self._seed = read, seed
        self._shapes: Mapping[str, Shape] = {p.tensor: p.full for p in plan.placements.values()}

    def read(self, tensor: str, box: Box) -> torch.Tensor:
        """The elements of a box."""
        if not is_adapter(tensor):
            return self._read(tensor, box)
        whole = torch.zeros(self._shapes[tensor])
        if ".lora_A." in tensor:
            generator = torch.Generator().manual_seed(derive_seed(self._seed, f"adapters/{tensor}"))
            bound = 1.0 / math.sqrt(whole.shape[1])
            whole.uniform_(-bound, bound, generator=generator)
        return whole[box.slices()]
