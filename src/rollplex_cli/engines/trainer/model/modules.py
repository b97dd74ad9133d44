"""Norms and MLPs as values that hold their parameters, so that a forward need not know which family they are of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F

from rollplex_cli.engines.trainer.model.parallel import sharded_embedding
from rollplex_cli.engines.trainer.model.primitives import rms_norm, swiglu

if TYPE_CHECKING:
    from collections.abc import Callable

    from rollplex_cli.engines.trainer.model.linear import RowLinear, StackedLinear
    from rollplex_cli.engines.trainer.model.parallel import TensorParallel, VocabShard


class Norm(Protocol):
    """[..., width] -> [..., width], over the last axis."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        ...


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """`primitives.rms_norm` with its weight."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Norm`."""
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """`weight * (x - mean) / sqrt(variance + eps) + bias` (Ba et al., 2016); inside in float32 or wider."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `Norm`."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of every head by itself, with one weight for all heads of all ranks.

    A rank sees the gradient of its own heads only; the ranks add theirs up once an update (`sharded.py`).
    """

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., heads, head_dim] -> the same."""
        return rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x))."""

    gate_up: StackedLinear
    down: RowLinear

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]."""
        return self.down(swiglu(self.gate_up(x)))


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """second(activation(first(x)))."""

    first: StackedLinear
    second: RowLinear
    activation: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., width] -> [..., width]."""
        return self.second(self.activation(self.first(x)))


def quick_gelu(x: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(1.702 x), an approximation of GELU (Hendrycks and Gimpel, 2016, section 2)."""
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    """The tanh approximation of GELU (the same, section 2)."""
    return F.gelu(x, approximate="tanh")


@dataclass(frozen=True, slots=True)
class PositionTable:
    """Learned positions of a square grid, row by row: `weight` [rows of this rank, hidden]."""

    weight: torch.Tensor
    shard: VocabShard
    parallel: TensorParallel

    def __call__(self, cells: torch.Tensor) -> torch.Tensor:
        """Cells of the grid, int64 of any shape -> [..., hidden]."""
        if self.parallel.size == 1:
            return F.embedding(cells, self.weight)
        return sharded_embedding(cells, self.weight, self.shard, self.parallel)


@dataclass(frozen=True, slots=True)
class Merger:
    """The projector: a norm, then an MLP over the channels of the patches that become one token."""

    norm: Norm
    first: StackedLinear
    second: RowLinear
    width: int
    """Channels of the merged patches."""
    norm_merged: bool = False
    """Whether the norm runs over them together rather than over each patch."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, hidden] -> [N / merge^2, text hidden], in the order of the rows."""
        x = self.norm(hidden.reshape(-1, self.width)) if self.norm_merged else self.norm(hidden).view(-1, self.width)
        return self.second(F.gelu(self.first(x)))
