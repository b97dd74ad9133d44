"""A Hugging Face module without weights of its own, ready to be pointed at the rollout engine's tensors."""

from __future__ import annotations

import json
from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.imports import without_collector
from rollplex_cli.data.compat import ensure_torchvision
from rollplex_cli.engines.lora.adapters import attach_adapters
from rollplex_cli.engines.weights.names import VISION_QKV_PARTS, vision_qkv
from rollplex_cli.engines.weights.shards import ShardPlan, plan_shards
from rollplex_cli.plan.families import family_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rollplex_cli.engines.lora.adapters import LoraSettings
    from rollplex_cli.plan.families import Family


def padded_vision_width(width: int, pad: int) -> int:
    """Width of the vision MLPs in the rollout engine, a multiple of `pad`. The added columns stay zero in training,
    because their gradients are products with zeros."""
    return -(-width // pad) * pad


def vision_mlp_width(config: Any) -> int:
    """Width of the vision MLPs as the checkpoint has it."""
    vision = config.vision_config
    return int(getattr(vision, "intermediate_size", 0) or vision.embed_dim * vision.mlp_ratio)


def load_config(model_dir: Path) -> Any:
    """The transformers configuration of a checkpoint folder, of the class of its family. Raises UsageError for a
    model of no known family."""
    path = model_dir / "config.json"
    if not path.is_file():
        raise UsageError(f"no `config.json` in the checkpoint folder: {model_dir}")
    family = family_of(json.loads(path.read_text(encoding="utf-8")), str(path))
    # By its class, not by its name: the rollout engine registers classes of its own under some names.
    return _transformers(family.config_class).from_pretrained(model_dir, local_files_only=True)


def family_of_config(config: Any) -> Family:
    """The family of a transformers configuration."""
    return family_of({"model_type": config.model_type})


def build_skeleton(config: Any, dtype: torch.dtype, *, pad_vision: bool = True) -> Any:
    """The family's `...ForConditionalGeneration` on the meta device with real (tiny) rotary buffers.

    Takes milliseconds and no memory at any size, and draws no random numbers. `pad_vision` widens the vision MLPs to
    the rollout engine's width; `config` itself is left alone.
    """
    family, config = family_of_config(config), deepcopy(config)
    if pad_vision and family.vision_pad > 1:
        width = config.vision_config.intermediate_size
        config.vision_config.intermediate_size = padded_vision_width(width, family.vision_pad)
    with torch.device("meta"):
        model = _transformers(family.model_class)(config)
    model = model.to(dtype=dtype)
    language, visual = model.model.language_model, model.model.visual
    language.rotary_emb = type(language.rotary_emb)(config.text_config)
    visual.rotary_pos_emb = type(visual.rotary_pos_emb)(visual.rotary_pos_emb.dim)
    model.tie_weights()
    return model.eval()


def build_shards(
    config: Any,
    dtype: torch.dtype,
    *,
    train_tp: int = 1,
    training_shard: int = 0,
    rollout_tp: int = 1,
    lora: LoraSettings | None = None,
) -> tuple[Any, ShardPlan]:
    """A meta module with the parameters of one rank (and the adapters that it trains, with `lora`), and their plan.

    At `train_tp` above 1 parameters have the shapes of the shard, and the stacked q, k and v of the vision tower are
    three parameters, `attn.qkv.0` to `attn.qkv.2`: inside a wider rollout shard they are not neighbours. Such a module
    is a container of parameters; its own forward does not run.

    Raises:
        UsageError: a degree that does not divide some width of the model.
    """
    model = build_skeleton(config, dtype)
    if lora is not None:
        attach_adapters(model, lora)
    shapes = parameter_shapes(model)
    plan = plan_shards(config, shapes, train_tp=train_tp, training_shard=training_shard, rollout_tp=rollout_tp)
    if train_tp == 1:
        return model, plan
    for name in shapes:
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        if vision_qkv(name) is None:
            module._parameters[attribute] = _meta(plan.placements[name].box.shape, dtype)
            continue
        for part in range(VISION_QKV_PARTS):
            if str(part) not in module._modules:
                module.add_module(str(part), torch.nn.Module())
            shape = plan.placements[f"{owner}.{part}.{attribute}"].box.shape
            module._modules[str(part)].register_parameter(attribute, _meta(shape, dtype))
        del module._parameters[attribute]
    model.tie_weights()
    return model, plan


def parameter_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a module's parameters by name, in its order, tied ones once."""
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))


def load_model(model_dir: Path, dtype: torch.dtype) -> Any:
    """A module with its own copy of the weights of a checkpoint folder (reference, cold start), vision not padded."""
    config = load_config(model_dir)
    model_class = _transformers(family_of_config(config).model_class)
    with quiet_transformers():
        model = model_class.from_pretrained(model_dir, config=config, dtype=dtype, local_files_only=True)
    return model.eval()


def _transformers(name: str) -> Any:
    with without_collector():
        ensure_torchvision()
        import transformers

        return getattr(transformers, name)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars of transformers inside: they would run through the caller's own display."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
