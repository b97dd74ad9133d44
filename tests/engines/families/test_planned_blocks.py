"""What the memory plan says of a vision block and of the parameters of its MLP, against the real ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollplex_cli.core.resources import model_config_folder, model_config_names
from rollplex_cli.data.compat import ensure_torchvision
from rollplex_cli.engines.trainer.model import vision
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.plan.families import FAMILIES
from rollplex_cli.plan.memory import activations
from rollplex_cli.plan.model import load_shape, shape_from_config


def kept_bytes(model: Any, grid: tuple[int, int, int]) -> int:
    """Bytes that autograd keeps of the first block, each storage once, without weights and rotary angles."""
    weights = model_weights(model)
    layout = vision.vision_layout((grid,), weights.vision_sizes, weights.dtype, weights.device)
    rows = grid[0] * grid[1] * grid[2]
    hidden = torch.randn(rows, weights.vision.blocks[0].norm1.weight.shape[0], requires_grad=True)
    ignored = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *layout.angles)}
    found: dict[int, int] = {}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ignored:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # a freed storage's address may come again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        vision.vision_block(weights, 0, hidden, layout)
    return sum(found.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_vision_block_keeps(kit: SimpleNamespace, family: str) -> None:
    model, grid = kit.model(family), (2, 16, 16)
    shape = shape_from_config("test", model.config.to_dict(), "the test's model")
    inputs: Any = SimpleNamespace(shape=shape, train_tp=1, bytes_per_value=4)
    planned = 2 * 16 * 16 * activations.vision_block(inputs).kept
    assert kept_bytes(model, grid) == pytest.approx(planned, rel=0.02)


@pytest.mark.parametrize("name", model_config_names())
def test_mlps_of_the_vision_tower(name: str) -> None:
    """Counted per family: a gate is there, or it is not."""
    ensure_torchvision()
    import transformers

    shape = load_shape(name)
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(model_config_folder(name))
        model = getattr(transformers, shape.family.model_class)(config)
    mlps = [
        parameter
        for key, parameter in model.model.visual.named_parameters()
        if ".mlp." in f".{key}" and "merger" not in key
    ]
    # The last biases stand among the norms, whole on every rank.
    biases = shape.vision_depth * shape.vision_hidden_size
    planned = sum(group.count for group in shape.groups(padded=False) if group.name.startswith("vision.mlp."))
    assert planned + biases == sum(parameter.numel() for parameter in mlps)
