"""From modules of transformers to values of the forward, for all families."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex_cli.engines.trainer.model.linear import Linear, RowLinear, StackedLinear, adapter_of
from rollplex_cli.engines.trainer.model.lora import LowRank
from rollplex_cli.engines.trainer.model.modules import LayerNorm, Merger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollplex_cli.engines.lora.adapters import LoraSettings
    from rollplex_cli.engines.trainer.model.lora import Adapter
    from rollplex_cli.engines.trainer.model.modules import Norm
    from rollplex_cli.engines.trainer.model.parallel import TensorParallel

VISION_EPS = 1e-6
"""Of the tower's norms, whatever the configuration says; so it is in the modules of transformers."""


def linear(module: Any) -> Linear:
    """A linear module."""
    return Linear(module.weight, module.bias)


def stacked(*modules: Any, parallel: TensorParallel, lora: LoraSettings | None = None) -> StackedLinear:
    """Linear modules of one input, or a single one, cut by rows; with their adapters where `lora` is given."""
    return StackedLinear.of(
        *(linear(module) for module in modules), parallel=parallel, adapter=_adapter(lora, *modules)
    )


def row(module: Any, parallel: TensorParallel, lora: LoraSettings | None = None) -> RowLinear:
    """A linear module cut by columns; with its adapter where `lora` is given."""
    return RowLinear(module.weight, module.bias, parallel, _adapter(lora, module))


def _adapter(lora: LoraSettings | None, *modules: Any) -> Adapter | None:
    """The adapters of modules whose outputs are stacked in this order."""
    if lora is None:
        return None
    parts, first = [], 0
    for module in modules:
        if hasattr(module, "lora_A"):
            parts.append(LowRank(module.lora_A.weight, module.lora_B.weight, first))
        first += module.weight.shape[0]
    return adapter_of(parts, lora.scale)


def layer_norm(module: Any) -> LayerNorm:
    """A LayerNorm of the vision tower."""
    return LayerNorm(module.weight, module.bias, VISION_EPS)


def merger(norm: Norm, first: Any, second: Any, parallel: TensorParallel, *, norm_merged: bool = False) -> Merger:
    """The projector: `norm`, of merged patches if `norm_merged`, and two linear modules."""
    return Merger(
        norm=norm, first=stacked(first, parallel=parallel), second=row(second, parallel), width=first.weight.shape[1],
        norm_merged=norm_merged,
    )  # fmt: skip


def vision_qkv(module: Any, parallel: TensorParallel) -> StackedLinear:
    """One matrix, or a shard's three modules `0` to `2`."""
    if getattr(module, "weight", None) is not None:
        return stacked(module, parallel=parallel)
    return stacked(*(module.get_submodule(str(part)) for part in range(3)), parallel=parallel)


def mrope_axes(rope: Mapping[str, Any]) -> tuple[int, ...]:
    """Axis of each rotary channel pair: `mrope_section` pairs of the temporal, row and column position one after
    the other (Qwen2-VL, section 2.1)."""
    return tuple(axis for axis, pairs in enumerate(rope["mrope_section"]) for _ in range(pairs))


def check(_config: Any) -> None:
    """Nothing beyond what every family must have."""
