"""Linear maps, RMS norm and rotary positions.

Whatever the Hugging Face module computes in float32 is computed here in `max(float32, dtype)`, so a float64 model
is float64 throughout. The two autograd functions exist because their generic gradients cost several times the
operations: at the sizes of a small model a step is made of dispatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


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
class StackedLinear:
    """Several linear maps of one input.

    Where their weights (and biases) are consecutive rows of one matrix, as in the rollout engine's fused tensors,
    that matrix is multiplied once; autograd still sees the separate parameters.
    """

    parts: tuple[Linear, ...]
    weight: torch.Tensor | None
    """All rows as one view, or None where the parts are not neighbours."""
    bias: torch.Tensor | None

    @classmethod
    def of(cls, *parts: Linear) -> StackedLinear:
        """Stack `parts`, fused if their memory allows it."""
        weight = _joined([p.weight for p in parts])
        biases = [p.bias for p in parts if p.bias is not None]
        bias = _joined(biases) if biases else None
        if biases and bias is None:
            weight = None
        return cls(parts, weight, bias)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """[..., in] -> one [..., out_i] per part."""
        if self.weight is None:
            return tuple(part(x) for part in self.parts)
        sizes = [part.weight.shape[0] for part in self.parts]
        if not torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias).split(sizes, dim=-1)
        weights = [part.weight for part in self.parts]
        biases = [part.bias for part in self.parts]
        out: torch.Tensor = _FusedLinear.apply(x, self.weight, self.bias, sizes, *weights, *biases)  # type: ignore[no-untyped-call]
        return out.split(sizes, dim=-1)


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
        weight_grad = product.reshape(-1, product.shape[-1]).sum(0).to(weight.dtype)
        wide_weight = weight.to(scale.dtype)
        mean = (product @ wide_weight).unsqueeze(-1).div_(product.shape[-1])
        x_grad = (wide_grad * wide_weight).addcmul_(wide_unit, mean, value=-1.0).mul_(scale)
        return x_grad.to(grad.dtype), weight_grad, None


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate channel pairs (i, i + d/2) of `x` [..., heads, d] by the angles of `cos`, `sin` [..., 1, d/2]
    (Su et al., 2021, in the half-split layout of Qwen)."""
    if not torch.is_grad_enabled():
        return _rotate(x, cos, sin, 1.0)
    out: torch.Tensor = _Rotary.apply(x, cos, sin)  # type: ignore[no-untyped-call]
    return out


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: float) -> torch.Tensor:
    low, high = x.to(cos.dtype).chunk(2, dim=-1)
    first = (low * cos).addcmul_(high, sin, value=-sign)
    second = (high * cos).addcmul_(low, sin, value=sign)
    return torch.cat((first, second), dim=-1).to(x.dtype)


class _Rotary(torch.autograd.Function):
    """A rotation's gradient is the rotation by the opposite angle."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, sin, -1.0), None, None


def inverse_frequencies(dim: int, theta: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[dim / 2] rotary frequencies, rounded to float32 as the Hugging Face buffers are."""
    steps = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    return (1.0 / (theta**steps)).to(compute_dtype(dtype))
