"""The one description of a prompt that rollout, reference and trainer all read.

Positions are computed once, here, and handed to every engine: the engines' own versions disagree for video.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import UsageError
from rollplex_cli.plan.families import family_of
from rollplex_cli.rl.positions import mrope_positions

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rollplex_cli.data.types import Prompt

_TOP_LEVEL = {"image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652}
_VISION = {"spatial_merge_size": 2, "temporal_patch_size": 2}
_TOKENS_PER_SECOND = 4
"""Defaults of the configurations of transformers, which leave a value equal to its default out of config.json."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaTokens:
    """What a model's configuration says about media: ids of the placeholders and sizes of the vision grid."""

    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    merge_size: int
    """Patches per token along rows and columns."""
    temporal_patch_size: int
    """Frames per temporal grid step."""
    patch_size: int
    """Pixels per patch along rows and columns."""
    tokens_per_second: float | None
    """Temporal positions per second of video; None for one position per temporal step, however long it is."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> MediaTokens:
        """Read the Hugging Face config.json of a model of a known family.

        Raises:
            UsageError: for a model of another kind, or a value that is not a number.
        """
        vision = config.get("vision_config")
        if not isinstance(vision, dict):
            raise UsageError(f"model has no vision configuration: {config.get('model_type')}")
        family = family_of(config)
        values = {key: config.get(key, default) for key, default in _TOP_LEVEL.items()}
        values |= {key: vision.get(key, default) for key, default in _VISION.items()}
        values["patch_size"] = vision.get("patch_size", family.patch_size)
        if family.video_time == "seconds":
            values["tokens_per_second"] = vision.get("tokens_per_second", _TOKENS_PER_SECOND)
        values["merge_size"] = values.pop("spatial_merge_size")
        for key, value in values.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"model configuration: `{key}` is not a number: {value!r}")
        return cls(**{"tokens_per_second": None, **values})


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptInput:
    """A prompt with its positions.

    `P` is the number of prompt tokens, media placeholders included.
    """

    prompt: Prompt
    position_ids: torch.Tensor
    """[3, P] int64: temporal, row and column axis of M-RoPE."""
    rope_delta: int
    """Generated token i (0-based) has position P + i + rope_delta on all three axes."""
    media_spans: tuple[tuple[int, int], ...]
    """First and last placeholder index (inclusive) of each medium, in order."""

    @property
    def num_tokens(self) -> int:
        """Prompt length P."""
        return len(self.prompt.token_ids)


def build_prompt_input(prompt: Prompt, config: MediaTokens) -> PromptInput:
    """Attach the positions that every engine uses for `prompt`.

    Raises:
        ValueError: where the placeholders of the prompt do not match its media.
    """
    positions = mrope_positions(
        prompt.token_ids,
        prompt.media,
        image_token_id=config.image_token_id,
        video_token_id=config.video_token_id,
        vision_start_token_id=config.vision_start_token_id,
        merge_size=config.merge_size,
        tokens_per_second=config.tokens_per_second,
    )
    return PromptInput(
        prompt=prompt,
        position_ids=positions.position_ids,
        rope_delta=positions.rope_delta,
        media_spans=positions.media_spans,
    )
