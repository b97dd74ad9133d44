"""The prefix as a chain of stages: what passes between them, those of the vision tower, and running the chain."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rollplex_cli.engines.trainer.model import vision
from rollplex_cli.engines.trainer.model.language import KeyValue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex_cli.data.types import Media
    from rollplex_cli.engines.trainer.model.parameters import ModelWeights

Carry = tuple[torch.Tensor, ...]
"""What one stage of the prefix hands to the next: hidden states, then the features that no decoder layer has taken yet.
Empty before the first stage and behind the last."""
Yield = tuple[Carry, KeyValue | None]
"""What a stage yields: its carry and boundary keys and values."""
Stage = Callable[[Carry], Yield]


def layout_of(weights: ModelWeights, media: Sequence[Media]) -> vision.VisionLayout:
    """The vision layout of media."""
    grids = tuple(m.grid_thw for m in media)
    return vision.vision_layout(grids, weights.vision_sizes, weights.dtype, weights.device)


def vision_stages(weights: ModelWeights, media: Sequence[Media]) -> list[Stage]:
    """Patch embedding and blocks, one stage each; none without media."""
    if not media:
        return []
    layout = layout_of(weights, media)

    def patch(_: Carry) -> Yield:
        patches = torch.cat([m.patches for m in media]) if len(media) > 1 else media[0].patches
        return (vision.patch_embed(weights, patches.to(weights.device), layout),), None

    def block(index: int) -> Stage:
        merger = weights.vision.deepstack.get(index)

        def run(carry: Carry) -> Yield:
            hidden, *features = carry
            hidden = vision.vision_block(weights, index, hidden, layout)
            return (hidden, *features, *([merger(hidden)] if merger else [])), None

        return run

    return [patch, *(block(i) for i in range(len(weights.vision.blocks)))]


def run_stages(stages: Sequence[Stage], saved: list[Carry] | None = None) -> tuple[KeyValue, ...]:
    """Chain the stages; `saved` receives the input of each."""
    carry: Carry = ()
    boundary = []
    for stage in stages:
        if saved is not None:
            saved.append(carry)
        carry, own = stage(carry)
        if own is not None:
            boundary.append(own)
    return tuple(boundary)


def stage_inputs(stages: Sequence[Stage]) -> list[Carry]:
    """The input of each stage, by running all but the last one without a graph."""
    inputs: list[Carry] = []
    with torch.no_grad():
        run_stages(stages[:-1], inputs)
        inputs.append(stages[-2](inputs[-1])[0] if len(stages) > 1 else ())
    return inputs


def backward(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Backward from those roots, each with its gradient, that depend on something trained."""
    if kept := [pair for pair in pairs if pair[0].requires_grad]:
        torch.autograd.backward([root for root, _ in kept], [grad for _, grad in kept])


def to_host(inputs: Sequence[Carry]) -> list[Carry]:
    """Copies on the host; a tensor that several stages hand on is copied once."""
    copies = {id(tensor): tensor.to("cpu") for carry in inputs for tensor in carry}
    return [tuple(copies[id(tensor)] for tensor in carry) for carry in inputs]
