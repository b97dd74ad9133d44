"""Linear maps, RMS norm and rotary positions.

Whatever the Hugging Face module computes in float32 is computed here in `max(float32, dtype)`, so a float64 model
is float64 throughout. The autograd functions exist because their generic gradients cost several times the
operations: at the sizes of a small model a step is made of dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from rollplex_cli.engines.trainer.model.lora import Adapter, LowRank
from rollplex_cli.engines.trainer.model.parallel import SINGLE, TensorParallel


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of norms, softmax and rotary angles for activations of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


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
        if self.parallel.size == 1:
            out = F.linear(x, self.weight, self.bias)
            return out if self.adapter is None else self.adapter.add_to(out, x)
        if self.adapter is None:
            if torch.is_grad_enabled():
                whole: torch.Tensor = _RowLinear.apply(x, self.weight, self.bias, self.parallel)  # type: ignore[no-untyped-call]
                return whole
            out = self.parallel.sum_(F.linear(x, self.weight))
            return out if self.bias is None else out.add_(self.bias)
        out = self.parallel.leave(self.adapter.add_to(F.linear(x, self.weight), x))
        return out if self.bias is None else out + self.bias


class _RowLinear(torch.autograd.Function):
    """The product and its sum over the group, whose gradient is the whole one on every rank."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parallel: TensorParallel
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        out = parallel.sum_(F.linear(x, weight))
        return out if bias is None else out.add_(bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grad = grads[0]
        flat = grad.reshape(-1, grad.shape[-1])
        weight_grad = flat.t() @ x.reshape(-1, x.shape[-1]) if wants_weight else None
        bias_grad = flat.sum(0) if wants_bias else None
        return grad @ weight if wants_x else None, weight_grad, bias_grad, None


@dataclass(frozen=True, slots=True)
class StackedLinear:
    """Several column-parallel linear maps of one input (or a single one): every rank has some of the outputs.

    Where their weights (and biases) are consecutive rows of one matrix, as in the rollout engine's fused tensors,
    that matrix is multiplied once; autograd still sees the separate parameters.
    """

    parts: tuple[Linear, ...]
    weight: torch.Tensor | None
    """All rows as one view, or None where the parts are not neighbours."""
    bias: torch.Tensor | None
    parallel: TensorParallel = SINGLE
    adapter: Adapter | None = None

    @classmethod
    def of(cls, *parts: Linear, parallel: TensorParallel = SINGLE, adapter: Adapter | None = None) -> StackedLinear:
        """Stack `parts`, fused if their memory allows it."""
        weight = _joined([p.weight for p in parts])
        biases = [p.bias for p in parts if p.bias is not None]
        bias = _joined(biases) if biases else None
        if biases and bias is None:
            weight = None
        return cls(parts, weight, bias, parallel, adapter)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., sum of out_i], the parts' outputs side by side."""
        if not torch.is_grad_enabled():
            out = self._product(x)
            return out if self.adapter is None else self.adapter.add_to(out, x)
        one = len(self.parts) == 1 and self.parallel.size == 1
        if self.adapter is None and not one and self.weight is not None and self.parts[0].weight.requires_grad:
            weights = [part.weight for part in self.parts]
            biases = [part.bias for part in self.parts]
            sizes = [weight.shape[0] for weight in weights]
            fused: torch.Tensor = _FusedLinear.apply(  # type: ignore[no-untyped-call]
                x, self.weight, self.bias, sizes, self.parallel, *weights, *biases
            )
            return fused
        x = self.parallel.enter(x)
        out = self._product(x)
        return out if self.adapter is None else self.adapter.add_to(out, x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.parts) == 1:
            return self.parts[0](x)
        if self.weight is None:
            return torch.cat([part(x) for part in self.parts], dim=-1)
        return F.linear(x, self.weight, self.bias)


class _FusedLinear(torch.autograd.Function):
    """One product over adjacent parameters; the gradient is handed back in their pieces, that of the input summed over
    the group."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sizes: list[int],
        parallel: TensorParallel,
        *params: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        # Not through save_for_backward: it is an alias of the parameters, whose version counters guard them.
        ctx.weight, ctx.sizes, ctx.has_bias, ctx.parallel = weight, sizes, bias is not None, parallel
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        grad = grads[0]
        flat = grad.reshape(-1, grad.shape[-1])
        weight_grads = torch.split_with_sizes(flat.t() @ x.reshape(-1, x.shape[-1]), ctx.sizes)
        bias_grads = torch.split_with_sizes(flat.sum(0), ctx.sizes) if ctx.has_bias else (None,) * len(ctx.sizes)
        input_grad = grad @ ctx.weight if ctx.needs_input_grad[0] else None
        if input_grad is not None and ctx.parallel.size > 1:
            ctx.parallel.sum_(input_grad)
        return (input_grad, None, None, None, None, *weight_grads, *bias_grads)


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


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`weight * x / sqrt(mean(x^2) + eps)` over the last axis (Zhang and Sennrich, 2019)."""
    if x.is_cuda:
        return F.rms_norm(x, weight.shape, weight, eps)  # one kernel, in float32 inside
    if not torch.is_grad_enabled():
        return _rms_forward(x, weight, eps)[0]
    out: torch.Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def _rms_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = x.to(compute_dtype(x.dtype))
    scale = torch.rsqrt_((wide * wide).mean(-1, keepdim=True).add_(eps))
    unit = (wide * scale).to(x.dtype)
    return weight * unit, unit, scale


class _RmsNorm(torch.autograd.Function):
    """d x = scale * (g - unit * mean(g * unit)) with g = weight * d y."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out, unit, scale = _rms_forward(x, weight, eps)
        ctx.save_for_backward(unit, scale, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        unit, scale, weight = ctx.saved_tensors
        grad = grads[0]
        wide_unit, wide_grad = unit.to(scale.dtype), grad.to(scale.dtype)
        product = wide_grad * wide_unit
        weight_grad = None
        if ctx.needs_input_grad[1]:
            weight_grad = product.reshape(-1, product.shape[-1]).sum(0).to(weight.dtype)
        wide_weight = weight.to(scale.dtype)
        mean = (product @ wide_weight).unsqueeze(-1).div_(product.shape[-1])
        x_grad = (wide_grad * wide_weight).addcmul_(wide_unit, mean, value=-1.0).mul_(scale)
        return x_grad.to(grad.dtype), weight_grad, None


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for [..., 2 * width] with the gate first (Shazeer, 2020)."""
    if not torch.is_grad_enabled():
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
    out: torch.Tensor = _SwiGlu.apply(gate_up)  # type: ignore[no-untyped-call]
    return out


class _SwiGlu(torch.autograd.Function):
    """Writes both halves of the gradient into one array."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        activated = F.silu(gate)
        ctx.save_for_backward(gate_up, activated)
        return activated * up

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gate_up, activated = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        gate_grad, up_grad = out.chunk(2, dim=-1)
        torch.mul(grads[0], activated, out=up_grad)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=gate_grad)
        return out


class Angles(NamedTuple):
    """Rotary angles over whole heads, [..., 1, head_dim]: `cos` of both halves, `sin` with the first half negated."""

    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def of(cls, angles: torch.Tensor) -> Angles:
        """From angles [..., head_dim / 2] of the channel pairs (i, i + head_dim / 2)."""
        cos, sin = angles.cos(), angles.sin()
        return cls(torch.cat((cos, cos), dim=-1).unsqueeze(-2), torch.cat((-sin, sin), dim=-1).unsqueeze(-2))


def rotary(
    x: torch.Tensor, angles: Angles, heads: tuple[int, ...], *, heads_first: bool = False
) -> tuple[torch.Tensor, ...]:
    """Cut projections `x` [..., all heads * head_dim] into `heads` (queries, keys and values, or the last two), each
    [..., heads, head_dim], and rotate all but the last (Su et al., 2021, in the half-split layout of Qwen).

    With `heads_first` `x` is [B, S, ...] and the parts are [B, heads, S, head_dim]. Without autograd in place: nobody
    else reads `x`. Taking the parts in one array saves their gradients a merge.
    """
    if torch.is_grad_enabled():
        out: tuple[torch.Tensor, ...] = _Rotary.apply(x, *angles, heads, heads_first)  # type: ignore[no-untyped-call]
        return out
    whole = x.view(*x.shape[:-1], sum(heads), -1)
    turned = whole[..., : -heads[-1], :]
    _rotate(turned, angles, 1.0, turned)
    return _parts(whole, heads, heads_first)


def _rotate(x: torch.Tensor, angles: Angles, sign: float, out: torch.Tensor) -> None:
    """Write `x` [..., heads, head_dim], rotated by `sign` times the angles, into `out`, which may be `x`. Computed in
    the angles' type without a copy in it."""
    low, high = x.chunk(2, dim=-1)
    swapped = torch.cat((high, low), dim=-1)
    torch.addcmul(x * angles.cos, swapped, angles.sin, value=sign, out=out)


def _parts(whole: torch.Tensor, heads: tuple[int, ...], heads_first: bool) -> tuple[torch.Tensor, ...]:
    # Not the method `split`, a function in Python that takes longer than the views it makes.
    first, dim = (whole.transpose(1, 2), 1) if heads_first else (whole, -2)
    return tuple(torch.split_with_sizes(first, heads, dim))


class _Rotary(torch.autograd.Function):
    """A rotation's gradient is the rotation by the opposite angle."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: tuple[int, ...], heads_first: bool
    ) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(cos, sin)
        ctx.heads_first, ctx.shape = heads_first, x.shape
        sizes = (sum(heads[:-1]), heads[-1])
        source = x.view(*x.shape[:-1], sum(heads), -1)
        out = torch.empty_like(source)
        turning, rest = torch.split_with_sizes(source, sizes, -2)
        turned, kept = torch.split_with_sizes(out, sizes, -2)
        _rotate(turning, Angles(cos, sin), 1.0, turned)
        kept.copy_(rest)  # their own memory: the projections are not kept for the backward
        return _parts(out, heads, heads_first)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        pieces = [grad.transpose(1, 2) for grad in grads] if ctx.heads_first else grads
        *turning, rest = pieces
        joined = turning[0] if len(turning) == 1 else torch.cat(turning, dim=-2)
        out = torch.empty(ctx.shape, dtype=rest.dtype, device=rest.device)
        heads = (joined.shape[-2], rest.shape[-2])
        turned, kept = torch.split_with_sizes(out.view(*ctx.shape[:-1], sum(heads), -1), heads, -2)
        _rotate(joined, Angles(*ctx.saved_tensors), -1.0, turned)
        kept.copy_(rest)
        return out, None, None, None, None


def inverse_frequencies(dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[dim / 2] rotary frequencies, rounded to float32 as the Hugging Face buffers are."""
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return (1.0 / (theta**steps)).to(compute_dtype(dtype))
