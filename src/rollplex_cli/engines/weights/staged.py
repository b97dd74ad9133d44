"""What may enter a collective or a file: contiguous tensors only.

A collective on a strided view sends and overwrites the bytes between its elements, which belong to its neighbours;
gloo does so without a word. Every tensor that leaves its process passes through here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself, which must be contiguous: the check before a collective that writes in place."""
    assert tensor.is_contiguous(), f"a strided view of shape {tuple(tensor.shape)} must be staged first"
    return tensor


def staged(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` if it is contiguous, else a contiguous copy: for what is only read."""
    return tensor.detach().contiguous()
