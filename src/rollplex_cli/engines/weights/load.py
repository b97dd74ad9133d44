"""A checkpoint folder straight into the tensors of one rank: only its slices are read, every name is accounted for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch

from rollplex_cli.core.errors import UsageError
from rollplex_cli.engines.weights.names import is_padded_vision_mlp, trainer_name
from rollplex_cli.engines.weights.shards import Box
from rollplex_cli.engines.weights.skeleton import vision_mlp_width

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rollplex_cli.engines.weights.shards import Shape, ShardPlan

INDEX = "model.safetensors.index.json"
MAX_NAMED = 8
_TIED_HEAD = "lm_head.weight"


class CheckpointReader:
    """Boxes of the tensors of a Hugging Face checkpoint folder (safetensors, in one file or several).

    Args:
        model_dir: the folder.
        config: its transformers configuration.
        full_shapes: parameters of the model with padded vision widths, tied ones once.

    Raises:
        UsageError: files that are missing, truncated or no safetensors; names that are missing, unexpected or have
            another shape. The message names them; nothing is skipped.
    """

    def __init__(self, model_dir: Path, config: Any, full_shapes: Mapping[str, Shape]) -> None:
        self._folder = model_dir
        self._files: dict[str, Any] = {}
        self._stored: dict[str, tuple[str, str]] = {}
        """Trainer name to (file, stored name)."""
        for file in _files(model_dir):
            self._files[file] = _open(model_dir / file)
            for name in self._files[file].keys():  # noqa: SIM118 - not a dict
                self._stored[trainer_name(name)] = (file, name)
        self._check(config, full_shapes)

    def read(self, tensor: str, box: Box) -> torch.Tensor:
        """The elements of a box, in the stored type; zeros where the box reaches into padding."""
        part = self._slice(tensor)
        shape = tuple(part.get_shape())
        common = box.intersection(Box.whole(shape))
        if common == box:
            exact: torch.Tensor = part[box.slices()]
            return exact
        stored = None if common is None else part[common.slices()]
        out = torch.zeros(box.shape, dtype=torch.float32 if stored is None else stored.dtype)
        if stored is not None and common is not None:
            out[common.slices(box.offset)] = stored
        return out

    def _slice(self, tensor: str) -> Any:
        file, name = self._stored[tensor]
        return self._files[file].get_slice(name)

    def _check(self, config: Any, full_shapes: Mapping[str, Shape]) -> None:
        allowed = {_TIED_HEAD} if config.tie_word_embeddings else set()
        faults = [f"missing `{name}`" for name in full_shapes if name not in self._stored]
        faults += [f"unexpected `{name}`" for name in self._stored if name not in full_shapes and name not in allowed]
        width = vision_mlp_width(config)
        for name, full in full_shapes.items():
            if name in self._stored:
                wanted = _unpadded(name, full, width)
                shape = tuple(self._slice(name).get_shape())
                if shape != wanted:
                    faults.append(f"`{name}` has shape {list(shape)}, expected {list(wanted)}")
        if faults:
            more = f" and {len(faults) - MAX_NAMED} more" if len(faults) > MAX_NAMED else ""
            raise UsageError(
                f"the checkpoint does not fit its `config.json`: {'; '.join(faults[:MAX_NAMED])}{more}: {self._folder}"
            )


def home_shapes(plan: ShardPlan) -> dict[str, tuple[int, ...]]:
    """Shapes of a rank's rollout tensors, for where no rollout engine makes them."""
    return {name: (parts[-1].first_row + parts[-1].rows, *parts[0].box.shape[1:]) for name, parts in plan.homes.items()}


@torch.no_grad()
def fill_homes(plan: ShardPlan, homes: Mapping[str, torch.Tensor], read: Callable[[str, Box], torch.Tensor]) -> None:
    """Write every byte of a rank's rollout tensors from `read(tensor, box)`; padded rows become zero."""
    for name, parts in plan.homes.items():
        home = homes[name]
        for part in parts:
            rows = part.box.shape[0]
            home[part.first_row : part.first_row + rows].copy_(read(part.tensor, part.box))
            home[part.first_row + rows : part.first_row + part.rows].zero_()
        home[parts[-1].first_row + parts[-1].rows :].zero_()


@torch.no_grad()
def fill_parameters(
    plan: ShardPlan,
    module: Any,
    read: Callable[[str, Box], torch.Tensor],
    device: str,
    places: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Give a meta module of `build_shards` parameters of its own with a rank's training shard (the reference).

    `places` holds contiguous tensors for them by parameter name; None leaves them to PyTorch.
    """
    for name, param in list(module.named_parameters()):
        placement = plan.placements[name]
        value = read(placement.tensor, placement.box)
        own = value.to(device=device, dtype=param.dtype).contiguous() if places is None else places[name].copy_(value)
        replacement = torch.nn.Parameter(own, requires_grad=param.requires_grad)
        for owner in module.modules():
            for attribute, own in list(owner._parameters.items()):
                if own is param:
                    owner._parameters[attribute] = replacement


def _files(folder: Path) -> list[str]:
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise UsageError(f"cannot read the index of the checkpoint: {index}") from error
    else:
        names = sorted(path.name for path in folder.glob("*.safetensors"))
    missing = [name for name in names if not (folder / name).is_file()]
    if missing or not names:
        what = ", ".join(f"`{name}`" for name in missing) or "`*.safetensors`"
        raise UsageError(f"the checkpoint has no {what}: {folder}")
    return names


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UsageError(
            f"cannot read the weights, the file is truncated or no safetensors: {path}", hint=str(error)
        ) from error


def _unpadded(name: str, full: Shape, width: int) -> Shape:
    if not is_padded_vision_mlp(name):
        return full
    return (full[0], width) if name.endswith("down_proj.weight") else (width, *full[1:])
