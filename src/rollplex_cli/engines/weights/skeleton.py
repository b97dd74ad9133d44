"""A Hugging Face module without weights of its own, ready to be pointed at the rollout engine's tensors."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from rollplex_cli.core.errors import UsageError
from rollplex_cli.data.compat import ensure_torchvision
from rollplex_cli.engines.weights.names import VISION_QKV_PARTS, vision_qkv
from rollplex_cli.engines.weights.shards import ShardPlan, plan_shards
from rollplex_cli.plan.model import VISION_PAD

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def padded_vision_width(width: int) -> int:
    """Width of the vision MLPs in the rollout engine. The added columns stay zero in training, because their
    gradients are products with zeros."""
    return -(-width // VISION_PAD) * VISION_PAD


def load_config(model_dir: Path) -> Any:
    """The `Qwen2_5_VLConfig` of a checkpoint folder. Raises UsageError for any other model."""
    ensure_torchvision()
    from transformers import AutoConfig, Qwen2_5_VLConfig

    if not (model_dir / "config.json").is_file():
        raise UsageError(f"no `config.json` in the checkpoint folder: {model_dir}")
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    if not isinstance(config, Qwen2_5_VLConfig):
        raise UsageError(f"only Qwen2.5-VL checkpoints can be trained, not {config.model_type!r}")
    return config


def build_skeleton(config: Any, dtype: torch.dtype, *, pad_vision: bool = True) -> Any:
    """A `Qwen2_5_VLForConditionalGeneration` on the meta device with real (tiny) rotary buffers.

    Takes milliseconds and no memory at any size, and draws no random numbers. `pad_vision` widens the vision MLPs to
    the rollout engine's width; `config` itself is left alone.
    """
    ensure_torchvision()
    from transformers import Qwen2_5_VLForConditionalGeneration

    config = deepcopy(config)
    if pad_vision:
        config.vision_config.intermediate_size = padded_vision_width(config.vision_config.intermediate_size)
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)
    model = model.to(dtype=dtype)  # type: ignore[call-arg]
    language, visual = model.model.language_model, model.model.visual
    language.rotary_emb = type(language.rotary_emb)(config.text_config)
    visual.rotary_pos_emb = type(visual.rotary_pos_emb)(visual.rotary_pos_emb.dim)
    model.tie_weights()
    return model.eval()


def build_shards(
    config: Any, dtype: torch.dtype, *, train_tp: int = 1, training_shard: int = 0, rollout_tp: int = 1
) -> tuple[Any, ShardPlan]:
    """A meta module with the parameters that one rank trains, and their plan.

    At `train_tp` above 1 parameters have the shapes of the shard, and the stacked q, k and v of the vision tower are
    three parameters, `attn.qkv.0` to `attn.qkv.2`: inside a wider rollout shard they are not neighbours. Such a module
    is a container of parameters; its own forward does not run.

    Raises:
        UsageError: a degree that does not divide some width of the model.
    """
    model = build_skeleton(config, dtype)
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
    ensure_torchvision()
    from transformers import Qwen2_5_VLForConditionalGeneration

    load_config(model_dir)
    with quiet_transformers():
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(model_dir, dtype=dtype, local_files_only=True)
    return model.eval()


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
