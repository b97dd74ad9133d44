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

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

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


@torch.no_grad()
def draw_weights(params: Mapping[str, torch.Tensor], seed: int, vision_width: int) -> None:
    """Fill the rollout's tensors: matrices from N(0, 0.02^2), norms with 1, biases with 0.

    The columns by which the rollout widens the vision MLPs beyond `vision_width` become 0, as after loading a
    checkpoint.

    Args:
        params: by SGLang name; a tied head may be present under both names.
        vision_width: `vision_config.intermediate_size`.
    """
    done: set[int] = set()
    for name, tensor in params.items():
        if tensor.data_ptr() in done:
            continue
        done.add(tensor.data_ptr())
        if tensor.dim() == 1:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        generator = torch.Generator(device=tensor.device)
        generator.manual_seed(derive_seed(seed, f"weights/{name}"))
        tensor.normal_(0.0, STANDARD_DEVIATION, generator=generator)
        if name.startswith("visual.") and name.endswith("gate_up_proj.weight"):
            for half in tensor.chunk(2):
                half[vision_width:].zero_()
        elif name.startswith("visual.") and name.endswith("down_proj.weight"):
            tensor[:, vision_width:].zero_()


def copy_of(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A copy of every tensor; names of one tensor share one copy."""
    copies: dict[int, torch.Tensor] = {}
    return {name: copies.setdefault(tensor.data_ptr(), tensor.detach().clone()) for name, tensor in params.items()}
