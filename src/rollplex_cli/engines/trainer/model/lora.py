"""Low-rank updates added to the output of frozen linear maps (LoRA, Hu et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class LowRank:
    """`lora_a` [rank, in] and `lora_b` [out, rank]; they update output columns from `first` on."""

    lora_a: torch.Tensor
    lora_b: torch.Tensor
    first: int

    @property
    def columns(self) -> slice:
        """Where the update goes."""
        return slice(self.first, self.first + self.lora_b.shape[0])


@dataclass(frozen=True, slots=True)
class Adapter:
    """The updates of the maps that are stacked in one product. `joined` [sum of ranks, in] is all their A as one
    matrix, where they lie next to each other."""

    parts: tuple[LowRank, ...]
    scale: float
    joined: torch.Tensor | None

    def add_to(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """`out[..., columns of a part] += scale * x A^T B^T` for every part, in place. `x` [..., in]."""
        if not torch.is_grad_enabled():
            self.forward(out, x)
            return out
        factors = [part.lora_a for part in self.parts] + [part.lora_b for part in self.parts]
        updated: torch.Tensor = _Update.apply(out, x, self, *factors)  # type: ignore[no-untyped-call]
        return updated

    def forward(self, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Update `out`; returns x A^T of all parts side by side, [rows, sum of ranks]. The rollout rounds at the same
        places: once after A, once after the sum."""
        rows, columns = x.reshape(-1, x.shape[-1]), out.view(-1, out.shape[-1])
        low = F.linear(rows, self.stacked_a())
        for part, piece in zip(self.parts, low.split(self.ranks(), dim=-1), strict=True):
            columns[:, part.columns].addmm_(piece, part.lora_b.t(), alpha=self.scale)
        return low

    def stacked_a(self) -> torch.Tensor:
        """All A as one matrix, a copy where they are apart."""
        return self.joined if self.joined is not None else torch.cat([part.lora_a.detach() for part in self.parts])

    def ranks(self) -> list[int]:
        """Rank of every part."""
        return [part.lora_a.shape[0] for part in self.parts]


class _Update(torch.autograd.Function):
    """With low = x A^T and g = d out: d low = scale * g B, d x = d low A, d A = d low^T x, d B = scale * g^T low."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, x: torch.Tensor, adapter: Adapter, *factors: torch.Tensor) -> torch.Tensor:
        low = adapter.forward(out, x)
        ctx.mark_dirty(out)
        ctx.save_for_backward(x, low, *factors)  # the factors for their version counters
        ctx.adapter = adapter
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, low = ctx.saved_tensors[:2]
        adapter: Adapter = ctx.adapter
        grad = grads[0]
        rows, columns = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1])
        pieces = [columns[:, part.columns] for part in adapter.parts]
        low_grad = torch.cat([g @ part.lora_b for g, part in zip(pieces, adapter.parts, strict=True)], dim=-1)
        low_grad *= adapter.scale
        x_grad = (low_grad @ adapter.stacked_a()).view(x.shape) if ctx.needs_input_grad[1] else None
        a_grads = (low_grad.t() @ rows).split(adapter.ranks())
        lows = low.split(adapter.ranks(), dim=-1)
        b_grads = [(g.t() @ piece) * adapter.scale for g, piece in zip(pieces, lows, strict=True)]
        return (grad, x_grad, None, *a_grads, *b_grads)
