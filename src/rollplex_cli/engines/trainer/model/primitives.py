"""RMS norm, SwiGLU and rotary positions.

Whatever the Hugging Face module computes in float32 is computed here in `max(float32, dtype)`, so a float64 model
is float64 throughout. The autograd functions exist because their generic gradients cost several times the
operations: at the sizes of a small model a step is made of dispatch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of norms, softmax and rotary angles for activations of `dtype`."""
    return torch.promote_types(dtype, torch.float32)


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
