"""Linear maps of the trainer against autograd's own."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from rollplex_cli.engines.trainer.model.linear import Linear, RowLinear, StackedLinear

ROWS, WIDTH, OUTS = 11, 6, (5, 3, 3)


def parameters(dtype: torch.dtype, *, device: str = "cpu", apart: bool, bias: bool) -> list[Linear]:
    """Maps whose weights are neighbours in one matrix, or rows of it with others between them."""
    generator = torch.Generator().manual_seed(7)
    gap = 2 if apart else 0
    rows = sum(OUTS) + gap * len(OUTS)
    matrix = torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64).to(device, dtype)
    vector = torch.randn(rows, generator=generator, dtype=torch.float64).to(device, dtype)
    starts = [sum(OUTS[:i]) + gap * i for i in range(len(OUTS))]
    found = []
    for start, out in zip(starts, OUTS, strict=True):
        weight = torch.nn.Parameter(matrix[start : start + out])
        found.append(Linear(weight, torch.nn.Parameter(vector[start : start + out]) if bias else None))
    return found


def all_of(parts: list[Linear]) -> list[torch.Tensor]:
    return [t for part in parts for t in (part.weight, part.bias) if t is not None]


def given(dtype: torch.dtype, width: int, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(width)
    return torch.randn(1, ROWS, width, generator=generator, dtype=torch.float64).to(device, dtype)


def expected(parts: list[Linear], x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output and the gradients of input and parameters, in float64."""
    leaf = x.detach().double().requires_grad_()
    params = [t.detach().double().requires_grad_() for t in all_of(parts)]
    stride = 2 if parts[0].bias is not None else 1
    outs = [F.linear(leaf, *params[i : i + stride]) for i in range(0, len(params), stride)]
    whole = torch.cat(outs, dim=-1)
    return whole.detach(), list(torch.autograd.grad(whole, [leaf, *params], grad.double()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("apart", [True, False])
def test_stacked_maps(apart: bool, bias: bool) -> None:
    parts = parameters(torch.float64, apart=apart, bias=bias)
    stack = StackedLinear.of(*parts)
    assert (stack.weight is None) == apart
    x, grad = given(torch.float64, WIDTH).requires_grad_(), given(torch.float64, sum(OUTS))
    wanted, wanted_grads = expected(parts, x, grad)
    out = stack(x)
    out.backward(grad)
    torch.testing.assert_close(out.detach(), wanted)
    for tensor, other in zip([x, *all_of(parts)], wanted_grads, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad, other)
    with torch.no_grad():
        assert torch.equal(stack(x), out)


def test_a_single_map_follows_its_parameter() -> None:
    (part,) = parameters(torch.float64, apart=False, bias=True)[:1]
    stack = StackedLinear.of(part)
    part.weight.data = torch.zeros_like(part.weight)
    assert part.bias is not None
    assert torch.equal(stack(given(torch.float64, WIDTH))[0], part.bias.expand(ROWS, -1))


@pytest.mark.parametrize("apart", [True, False])
def test_gradients_are_added_where_they_lie(apart: bool) -> None:
    """In the place that a parameter's gradient has, whatever autograd would have done with it."""
    parts = parameters(torch.float64, apart=apart, bias=True)
    params = all_of(parts)
    places = [torch.full_like(t, 0.5) for t in params]
    for param, place in zip(params, places, strict=True):
        param.grad = place
    x, grad = given(torch.float64, WIDTH).requires_grad_(), given(torch.float64, sum(OUTS))
    _, wanted = expected(parts, x, grad)
    for times in (1, 2):
        StackedLinear.of(*parts)(x).backward(grad)
        for param, place, other in zip(params, places, wanted[1:], strict=True):
            assert param.grad is place
            torch.testing.assert_close(place, 0.5 + times * other)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("apart", [True, False])
def test_wide_gradients_of_narrow_weights(apart: bool, device: str) -> None:
    parts = parameters(torch.bfloat16, apart=apart, bias=True, device=device)
    params = all_of(parts)
    for param in params:
        param.grad_dtype = torch.float32  # type: ignore[attr-defined]
        param.grad = torch.zeros(param.shape, device=device)
    x = given(torch.bfloat16, WIDTH, device).requires_grad_()
    grad = given(torch.bfloat16, sum(OUTS), device)
    out = StackedLinear.of(*parts)(x)
    wanted, wanted_grads = expected(parts, x, grad)
    out.backward(grad)
    torch.testing.assert_close(out.detach().double(), wanted, rtol=2e-2, atol=2e-2)
    for tensor, other in zip([x, *params], wanted_grads, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad.double(), other, rtol=2e-2, atol=3e-2)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_a_frozen_parameter_gets_nothing(frozen: int) -> None:
    parts = parameters(torch.float64, apart=True, bias=True)
    parts[frozen].weight.requires_grad_(False)
    bias = parts[frozen].bias
    assert bias is not None
    bias.requires_grad_(False)
    x, grad = given(torch.float64, WIDTH), given(torch.float64, sum(OUTS))
    _, wanted = expected(parts, x, grad)
    StackedLinear.of(*parts)(x).backward(grad)
    for param, other in zip(all_of(parts), wanted[1:], strict=True):
        if param is bias or param is parts[frozen].weight:
            assert param.grad is None
        else:
            assert param.grad is not None
            torch.testing.assert_close(param.grad, other)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("strided", [True, False])
def test_a_row_map(strided: bool, bias: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    matrix = torch.randn(OUTS[0], 2 * WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.nn.Parameter(matrix[:, WIDTH:] if strided else matrix[:, WIDTH:].contiguous())
    part = Linear(weight, torch.nn.Parameter(matrix[:, 0].clone()) if bias else None)
    x, grad = given(torch.float64, WIDTH).requires_grad_(), given(torch.float64, OUTS[0])
    wanted, wanted_grads = expected([part], x, grad)
    place = torch.zeros(weight.shape, dtype=torch.float64)
    weight.grad = place
    out = RowLinear(part.weight, part.bias)(x)
    out.backward(grad)
    torch.testing.assert_close(out.detach(), wanted)
    assert weight.grad is place
    for tensor, other in zip([x, *all_of([part])], wanted_grads, strict=True):
        assert tensor.grad is not None
        torch.testing.assert_close(tensor.grad, other)


def test_columns_are_the_parts() -> None:
    stack = StackedLinear.of(*parameters(torch.float64, apart=False, bias=False))
    whole = torch.arange(2.0 * sum(OUTS)).view(2, -1)
    assert torch.equal(torch.cat(stack.columns(whole), dim=1), whole)
    bounds = [0, *torch.tensor(OUTS).cumsum(0).tolist()]
    for piece, (first, end) in zip(stack.columns(whole), pairwise(bounds), strict=True):
        assert torch.equal(piece, whole[:, first:end])
