"""Linear maps, whole or cut over a training group, and where the gradients of their weights go.

A weight whose `.grad` exists gets its gradient added there by the product itself, and autograd hears of none: as an
array of its own each would be written, cast to the type of `.grad` and read again, three times the traffic of the
sum. A weight without one gets it from autograd as usual.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from rollplex_cli.engines.trainer.model.lora import Adapter, LowRank
from rollplex_cli.engines.trainer.model.parallel import SINGLE, TensorParallel


@dataclass(frozen=True, slots=True)
class Linear:
    """`weight` [out, in] and `bias` [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RowLinear:
    """A row-parallel map: `weight` [out, in of this rank], which may be a strided view; `bias` [out] or None, whole
    on every rank."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    parallel: TensorParallel = SINGLE
    adapter: Adapter | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in of this rank] -> [..., out], whole on every rank."""
        if self.adapter is None:
            if torch.is_grad_enabled():
                whole: torch.Tensor = _RowLinear.apply(x, self.weight, self.bias, self.parallel)  # type: ignore[no-untyped-call]
                return whole
            return _row_product(x, self.weight, self.bias, self.parallel)
        if self.parallel.size == 1:
            return self.adapter.add_to(F.linear(x, self.weight, self.bias), x)
        out = self.parallel.leave(self.adapter.add_to(F.linear(x, self.weight), x))
        return out if self.bias is None else out + self.bias


def _row_product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parallel: TensorParallel
) -> torch.Tensor:
    if parallel.size == 1:
        return F.linear(x, weight, bias)
    out = parallel.sum_(F.linear(x, weight))
    return out if bias is None else out.add_(bias)


class _RowLinear(torch.autograd.Function):
    """The product and its sum over the group, whose gradient is the whole one on every rank."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parallel: TensorParallel
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.bias = weight, bias  # a layer that runs again saves them detached, without their `.grad`
        return _row_product(x, weight, bias, parallel)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grad = grads[0]
        rows = grad.reshape(-1, grad.shape[-1])
        weight_grad = _add_product(ctx.weight, rows, x.reshape(-1, x.shape[-1])) if wants_weight else None
        (bias_grad,) = _add_sums([ctx.bias if wants_bias else None], rows, [rows.shape[1]])
        return grad @ weight if wants_x else None, weight_grad, bias_grad, None


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """Several column-parallel linear maps of one input (or a single one): every rank has some of the outputs.

    Where their weights (and biases) are consecutive rows of one matrix, as in the rollout engine's fused tensors,
    that matrix is multiplied once; autograd still sees the separate parameters.
    """

    parts: tuple[Linear, ...]
    weight: torch.Tensor | None
    """All rows as one view, or None where the parts are not neighbours: where a rank trains a share of what its
    rollout engine stacks."""
    bias: torch.Tensor | None
    parallel: TensorParallel = SINGLE
    adapter: Adapter | None = None

    @classmethod
    def of(cls, *parts: Linear, parallel: TensorParallel = SINGLE, adapter: Adapter | None = None) -> StackedLinear:
        """Stack `parts`, fused if their memory allows it."""
        if len(parts) == 1:
            return cls(parts, parts[0].weight, parts[0].bias, parallel, adapter)
        weight = _joined([p.weight for p in parts])
        biases = [p.bias for p in parts if p.bias is not None]
        bias = _joined(biases) if biases else None
        if biases and bias is None:
            weight = None
        return cls(parts, weight, bias, parallel, adapter)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., sum of out_i], the parts' outputs side by side."""
        if not torch.is_grad_enabled():
            out = self.product(x)
            return out if self.adapter is None else self.adapter.add_to(out, x)
        if self.adapter is None:
            weights = [part.weight for part in self.parts]
            biases = [part.bias for part in self.parts]
            stacked: torch.Tensor = _StackedLinear.apply(x, self, *weights, *biases)  # type: ignore[no-untyped-call]
            return stacked
        x = self.parallel.enter(x)
        return self.adapter.add_to(self.product(x), x)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """The maps without adapter and collectives. Under autograd the weights must be frozen where they are apart."""
        if self.weight is not None:
            return F.linear(x, self.weight, self.bias)
        if torch.is_grad_enabled():
            return torch.cat([part(x) for part in self.parts], dim=-1)
        rows = x.reshape(-1, x.shape[-1])
        out = rows.new_empty(len(rows), sum(self.widths))
        for part, piece in zip(self.parts, self.columns(out), strict=True):
            if part.bias is None:
                torch.mm(rows, part.weight.t(), out=piece)
            else:
                torch.addmm(part.bias, rows, part.weight.t(), out=piece)
        return out.view(*x.shape[:-1], out.shape[1])

    @property
    def widths(self) -> list[int]:
        """out_i."""
        return [part.weight.shape[0] for part in self.parts]

    def columns(self, stacked: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The columns of every part of [rows, sum of out_i]."""
        # Not the method `split`, a function in Python that takes longer than the views it makes.
        return tuple(torch.split_with_sizes(stacked, self.widths, 1))


class _StackedLinear(torch.autograd.Function):
    """Products of one input; its gradient is summed over the group."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stack: StackedLinear, *params: torch.Tensor | None) -> torch.Tensor:
        # The parameters for their version counters; a fused view of them has the same one.
        ctx.save_for_backward(x, *params)
        ctx.stack = stack
        return stack.product(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, stack = ctx.saved_tensors[0], ctx.stack
        wants_x, _, *wants = ctx.needs_input_grad
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        rows = x.reshape(-1, x.shape[-1])
        pieces = stack.columns(grad)
        x_grad = None
        if wants_x:
            x_grad = _input_gradient(stack, grad, pieces).view(x.shape)
            if stack.parallel.size > 1:
                stack.parallel.sum_(x_grad)
        count = len(stack.parts)
        parts = zip(stack.parts, pieces, wants[:count], strict=True)
        weight_grads = [_add_product(part.weight, piece, rows) if wanted else None for part, piece, wanted in parts]
        biases = [part.bias if wanted else None for part, wanted in zip(stack.parts, wants[count:], strict=True)]
        return x_grad, None, *weight_grads, *_add_sums(biases, grad, stack.widths)


def _input_gradient(stack: StackedLinear, grad: torch.Tensor, pieces: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """[rows, in] from the gradient of all outputs [rows, sum of out_i]."""
    if stack.weight is not None:
        return grad @ stack.weight
    first, *others = zip(pieces, stack.parts, strict=True)
    total = first[0] @ first[1].weight
    for piece, part in others:
        total.addmm_(piece, part.weight)
    return total


def _add_product(param: torch.Tensor, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """Add the gradient grad^T x [out, in] of a weight to its `.grad` and return None; without one return it."""
    place = param.grad
    if place is None:
        return grad.t() @ x
    if place.dtype == x.dtype:
        torch.addmm(place, grad.t(), x, out=place)
    elif _adds_wide(x.device, x.dtype, place.dtype):
        torch.addmm(place, grad.t(), x, out_dtype=place.dtype, out=place)
    else:
        place.add_(grad.t() @ x)
    return None


def _add_sums(biases: list[torch.Tensor | None], grad: torch.Tensor, widths: list[int]) -> list[torch.Tensor | None]:
    """The same for biases, whose outputs lie side by side in `grad` [rows, sum of widths]; None for one that is not
    trained."""
    places = [bias.grad for bias in biases if bias is not None]
    if not places:
        return [None] * len(biases)
    sums = torch.split_with_sizes(grad.sum(0, dtype=places[0].dtype if places[0] is not None else None), widths)
    found: list[torch.Tensor | None] = []
    for bias, own in zip(biases, sums, strict=True):
        place = bias.grad if bias is not None else None
        if place is not None:
            place.add_(own)
        found.append(own if bias is not None and place is None else None)
    return found


@lru_cache(maxsize=8)
def _adds_wide(device: torch.device, narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Whether a product of `narrow` matrices can be added to a `wide` one in one call. Not every release of PyTorch
    that has the call allows it."""
    if device.type != "cuda":
        return False
    ones = torch.ones(16, 16, dtype=narrow, device=device)
    total = torch.ones(16, 16, dtype=wide, device=device)
    try:
        torch.addmm(total, ones, ones, out_dtype=wide, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17).all())


def adapter_of(parts: list[LowRank], scale: float) -> Adapter | None:
    """The adapter of stacked maps, None without parts."""
    return Adapter(tuple(parts), scale, _joined([part.lora_a for part in parts])) if parts else None


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """One view over row-contiguous tensors that follow each other in one storage, else None."""
    first = tensors[0].detach()
    expected = first.data_ptr()
    for tensor in tensors:
        same = tensor.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if tensor.is_meta or not same or not tensor.is_contiguous() or tensor.data_ptr() != expected:
            return None
        expected += tensor.numel() * tensor.element_size()
    rows = sum(t.shape[0] for t in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())
