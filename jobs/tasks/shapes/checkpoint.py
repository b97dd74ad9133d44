"""The first checkpoint of the task: tokenizer, processors and random weights, as Hugging Face files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import UsageError
from rollplex_cli.data.compat import ensure_torchvision
from rollplex_cli.plan.families import family_of

from . import clips
from .tokenizer import CHAT_TEMPLATE, build_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from rollplex_cli.plan.families import Family

_PIXELS = {"shortest_edge": 784, "longest_edge": 12544}
"""Least and most pixels of a frame: one merged patch and the 112x112 of a clip."""


def training_sentences() -> list[str]:
    """What the tokenizer learns from: every question and every answer that any option of the task can make."""
    sentences = [f"user\n{question}" for question in clips.all_questions(len(clips.KINDS))]
    answers = [answer for kind in clips.KINDS for answer in clips.ANSWERS[kind]]
    # Twice, because a pair of characters that occurs once is not merged.
    return sentences + 2 * [f"assistant\n<answer>{answer}</answer>" for answer in answers]


def build_checkpoint(base_dir: Path, config_json: Path, seed: int | None) -> None:
    """Write a checkpoint that `AutoProcessor` and the model class of its family load.

    Args:
        base_dir: created if needed.
        config_json: sizes of the model; ids of special tokens in it are replaced by the tokenizer's.
        seed: of the weights. Equal seeds give equal files; None writes none.

    Raises:
        UsageError: the vocabulary of the model is smaller than the tokenizer's.
    """
    ensure_torchvision()
    tokenizer = build_tokenizer(training_sentences())
    values = json.loads(config_json.read_text(encoding="utf-8"))
    family = family_of(values, str(config_json))
    config = _config(family, values, tokenizer)
    if len(tokenizer) > config.text_config.vocab_size:
        raise UsageError(
            f"the tokenizer of this task needs {len(tokenizer)} ids, more than the model's vocabulary of: "
            f"{config.text_config.vocab_size}"
        )
    base_dir.mkdir(parents=True, exist_ok=True)
    _save_processors(base_dir, family, tokenizer, config.vision_config)
    if seed is None:
        config.architectures = [family.model_class]
        config.save_pretrained(base_dir)
    else:
        _save_weights(base_dir, family, config, tokenizer, seed)


def _config(family: Family, values: dict[str, Any], tokenizer: Any) -> Any:
    import transformers

    names = ("image_pad", "video_pad", "vision_start", "vision_end")
    image, video, start, end = (tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in names)
    values = values | {"image_token_id": image, "video_token_id": video}
    values |= {"vision_start_token_id": start, "vision_end_token_id": end}
    ends = {
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    values["text_config"] = values["text_config"] | ends
    return getattr(transformers, family.config_class)(**(values | ends))


def _save_processors(base_dir: Path, family: Family, tokenizer: Any, vision: Any) -> None:
    import transformers
    from transformers import Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    sizes = {
        "patch_size": vision.patch_size,
        "temporal_patch_size": vision.temporal_patch_size,
        "merge_size": vision.spatial_merge_size,
    }
    image = Qwen2VLImageProcessor(size=dict(_PIXELS), **sizes)
    video_class = Qwen3VLVideoProcessor if family.video_time == "text" else Qwen2VLVideoProcessor
    video = video_class(size=dict(_PIXELS), **sizes)
    processor = getattr(transformers, family.processor_class)(
        image_processor=image, video_processor=video, tokenizer=tokenizer, chat_template=CHAT_TEMPLATE
    )
    processor.save_pretrained(base_dir)
    # Older readers look for one file per processor.
    image.save_pretrained(base_dir)
    video.save_pretrained(base_dir)


def _save_weights(base_dir: Path, family: Family, config: Any, tokenizer: Any, seed: int) -> None:
    import torch
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, family.model_class)(config)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(base_dir)
