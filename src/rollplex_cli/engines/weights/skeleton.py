"""A Hugging Face module without weights of its own, ready to be pointed at the rollout engine's tensors."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch

from rollplex_cli.core.errors import UsageError
from rollplex_cli.data.compat import ensure_torchvision

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VISION_MLP_MULTIPLE = 8
"""The rollout engine rounds the width of the vision MLPs up to this; the added columns stay zero in training,
because their gradients are products with zeros."""


def padded_vision_width(width: int) -> int:
    """Width of the vision MLPs in the rollout engine."""
    return -(-width // VISION_MLP_MULTIPLE) * VISION_MLP_MULTIPLE


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
