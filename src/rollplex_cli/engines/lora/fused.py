"""LoRA inside the engine: SGLang's projections with low-rank updates from tensors that never move.

SGLang's own LoRA serves many adapters at once from a pool it copies them into, with kernels that need Triton. Here is
one adapter, trained in this very process: its tensors are the trainer's too, so an update needs no copy, and a decode
graph captured over them stays good.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from rollplex_cli.engines.weights.names import ADAPTED_MODULES

if TYPE_CHECKING:
    from rollplex_cli.engines.lora.adapters import LoraSettings


@dataclass(frozen=True, slots=True)
class Update:
    """One part of a fused module: rows [0, rank) of `lora_A` from `first_a` on, rows of `lora_B` and columns of the
    output."""

    first_a: int
    b_rows: slice
    columns: slice


class AdaptedMethod:
    """Takes the place of a module's `quant_method`: its product, plus the updates. Row-parallel modules reduce over
    ranks afterwards, so each rank adds its part."""

    def __init__(self, inner: Any, updates: tuple[Update, ...], rank: int, scale: float) -> None:
        self._inner, self._updates, self._rank, self._scale = inner, updates, rank, scale

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[N, in] -> [N, out]."""
        out: torch.Tensor = self._inner.apply(layer, x, bias)
        low = functional.linear(x, layer.lora_A)
        for update in self._updates:
            piece = low[:, update.first_a : update.first_a + self._rank]
            out[:, update.columns].addmm_(piece, layer.lora_B[update.b_rows].t(), alpha=self._scale)
        return out


def attach(model: Any, lora: LoraSettings) -> None:
    """Give the fused modules of every decoder layer of SGLang's `model` parameters `lora_A` [parts x rank, in] and
    `lora_B` [sum of the parts' outputs, rank], zero until somebody writes them; sizes are those of this rank."""
    for layer in model.model.layers:
        for fused in sorted({ADAPTED_MODULES[target][1] for target in lora.targets}):
            block = next(block for block, name, _ in ADAPTED_MODULES.values() if name == fused)
            module = layer.get_submodule(f"{block}.{fused}")
            _attach(module, _output_sizes(fused, module), lora)


def _output_sizes(fused: str, module: Any) -> dict[str, int]:
    """Output columns on this rank of every part, in order."""
    if fused == "qkv_proj":
        kv = int(module.kv_proj_shard_size)
        return {"q_proj": int(module.q_proj_shard_size), "k_proj": kv, "v_proj": kv}
    if fused == "gate_up_proj":
        gate, up = module.output_partition_sizes
        return {"gate_proj": int(gate), "up_proj": int(up)}
    return {fused: int(module.weight.shape[0])}


def _attach(module: Any, sizes: dict[str, int], lora: LoraSettings) -> None:
    updates: list[Update] = []
    column = row = 0
    for name, size in sizes.items():
        if name in lora.targets:
            updates.append(Update(len(updates) * lora.rank, slice(row, row + size), slice(column, column + size)))
            row += size
        column += size
    weight = module.weight
    assert column == weight.shape[0], (sizes, tuple(weight.shape))
    shapes = {"lora_A": (len(updates) * lora.rank, weight.shape[1]), "lora_B": (row, lora.rank)}
    for name, shape in shapes.items():
        module.register_parameter(name, torch.nn.Parameter(weight.new_zeros(shape), requires_grad=False))
    module.quant_method = AdaptedMethod(module.quant_method, tuple(updates), lora.rank, lora.scale)
