"""Random weights drawn where they lie, for shapes whose checkpoint nobody has or wants on a disk.

A base folder with `MARKER` has no weights of its own: the rollout engine is built without loading any, and its
tensors are filled here. Equal seeds give equal weights on devices of one kind, whatever the number of ranks.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch

from rollplex_cli.core.files import write_atomic
from rollplex_cli.core.seeds import derive_seed
from rollplex_cli.engines.weights.names import is_padded_vision_mlp

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rollplex_cli.engines.weights.shards import Box, Shape

MARKER = "random_weights.json"
STANDARD_DEVIATION = 0.02
"""Of every matrix, as in the Hugging Face configurations (`initializer_range`)."""


def mark_random(base_dir: Path, seed: int) -> None:
    """Say in a base folder that its weights are drawn at start."""
    write_atomic(base_dir / MARKER, json.dumps({"seed": seed}) + "\n")


def random_seed_of(base_dir: Path) -> int | None:
    """Seed of the weights of a marked folder; None for a folder with weights."""
    path = base_dir / MARKER
    return int(json.loads(path.read_text(encoding="utf-8"))["seed"]) if path.exists() else None


class RandomReader:
    """Boxes of tensors that exist nowhere: matrices from N(0, 0.02^2), norms 1, biases 0, padding 0.

    Every tensor is a function of the seed and its name; a rank draws it whole and keeps its box, so that the model is
    the same under any degrees. `read` stands where `load.CheckpointReader.read` does.

    Args:
        full_shapes: by Hugging Face name, vision widths padded.
        vision_width: `skeleton.vision_mlp_width`.
        device: where tensors are drawn.
    """

    def __init__(self, seed: int, full_shapes: Mapping[str, Shape], vision_width: int, device: torch.device) -> None:
        self._seed, self._shapes, self._width, self._device = seed, full_shapes, vision_width, device
        self._last: tuple[str, torch.Tensor] | None = None

    def read(self, tensor: str, box: Box) -> torch.Tensor:
        """The elements of a box, float32."""
        if self._last is None or self._last[0] != tensor:
            self._last = None  # before the next one is drawn, not after
            self._last = (tensor, self._draw(tensor))
        return self._last[1][box.slices()]

    def _draw(self, name: str) -> torch.Tensor:
        out = torch.empty(self._shapes[name], device=self._device)
        if out.dim() == 1:
            return out.fill_(0.0 if name.endswith("bias") else 1.0)
        generator = torch.Generator(device=self._device)
        generator.manual_seed(derive_seed(self._seed, f"weights/{name}"))
        out.normal_(0.0, STANDARD_DEVIATION, generator=generator)
        if is_padded_vision_mlp(name):
            columns = name.endswith("down_proj.weight")
            (out[:, self._width :] if columns else out[self._width :]).zero_()
        return out
