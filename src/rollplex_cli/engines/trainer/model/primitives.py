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
        alone = self.parallel.size == 1
        out = F.linear(x, self.weight, self.bias if alone else None)
        if self.adapter is not None:
            out = self.adapter.add_to(out, x)
        if alone:
            return out
        out = self.parallel.leave(out)
        return out if self.bias is None else out + self.bias


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
        x = self.parallel.enter(x)
        out = self._product(x)
        return out if self.adapter is None else self.adapter.add_to(out, x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.parts) == 1:
            return self.parts[0](x)
        if self.weight is None:
            return torch.cat([part(x) for part in self.parts], dim=-1)
        if not torch.is_grad_enabled() or not any(part.weight.requires_grad for part in self.parts):
            return F.linear(x, self.weight, self.bias)
        weights = [part.weight for part in self.parts]
        biases = [part.bias for part in self.parts]
        sizes = [weight.shape[0] for weight in weights]
        out: torch.Tensor = _FusedLinear.apply(x, self.weight, self.bias, sizes, *weights, *biases)  # type: ignore[no-untyped-call]
        return out


class _FusedLinear(torch.autograd.Function):
    """One product over adjacent parameters; the gradient is handed back in their pieces."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sizes: list[int],
        *params: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        # Not through save_for_backward: it is an alias of the parameters, whose version counters guard them.
        ctx.weight, ctx.sizes, ctx.has_bias = weight, sizes, bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        grad = grads[0]
        flat = grad.reshape(-1, grad.shape[-1])
        weight_grads = (flat.t() @ x.reshape(-1, x.shape[-1])).split(ctx.sizes)
        bias_grads = flat.sum(0).split(ctx.sizes) if ctx.has_bias else (None,) * len(ctx.sizes)
        input_grad = grad @ ctx.weight if ctx.needs_input_grad[0] else None
        return (input_grad, None, None, None, *weight_grads, *bias_grads)


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


def rotary(x: torch.Tensor, angles: Angles, heads: int) -> torch.Tensor:
    """Rotate the first `heads` heads of `x` [..., all heads, head_dim]; the others pass through (Su et al., 2021, in
    the half-split layout of Qwen). Taking queries, keys and values in one array saves their gradients a merge."""
    if not torch.is_grad_enabled():
        return _rotate(x, angles, heads, 1.0)
    out: torch.Tensor = _Rotary.apply(x, *angles, heads)  # type: ignore[no-untyped-call]
    return out


def _rotate(x: torch.Tensor, angles: Angles, heads: int, sign: float) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    turned = out[..., :heads, :]
    wide = x[..., :heads, :].to(angles.cos.dtype)
    low, high = wide.chunk(2, dim=-1)
    swapped = torch.cat((high, low), dim=-1)
    if out.dtype == wide.dtype:
        torch.mul(wide, angles.cos, out=turned)
        turned.addcmul_(swapped, angles.sin, value=sign)
    else:
        turned.copy_((wide * angles.cos).addcmul_(swapped, angles.sin, value=sign))
    out[..., heads:, :] = x[..., heads:, :]
    return out


class _Rotary(torch.autograd.Function):
    """A rotation's gradient is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, heads: int) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.heads = heads
        return _rotate(x, Angles(cos, sin), heads, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _rotate(grads[0], Angles(*ctx.saved_tensors), ctx.heads, -1.0), None, None, None


def inverse_frequencies(dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[dim / 2] rotary frequencies, rounded to float32 as the Hugging Face buffers are."""
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return (1.0 / (theta**steps)).to(compute_dtype(dtype))
