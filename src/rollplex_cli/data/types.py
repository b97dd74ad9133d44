"""What a data set yields: samples (rows) and prompts (rows after tokenizer and processor)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRef:
    """A file that a sample shows to the model."""

    kind: Literal["video", "image"]
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn of a conversation: text and media in the order in which the model sees them."""

    role: Literal["system", "user", "assistant"]
    content: tuple[str | MediaRef, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One row: a question about media with its true answer."""

    sample_id: str
    question: str
    answer: str
    kind: str
    """Which kind of question; only used to break results down."""
    media: tuple[MediaRef, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    """Further columns of the row, for reward functions."""
    messages: tuple[Message, ...] = ()
    """The whole prompt, where it is more than one user turn of the media followed by the question. Its media are
    those of `media`, in that order; `question` is then only shown to people."""

    def turns(self) -> tuple[Message, ...]:
        """The prompt as messages, whichever way it is given."""
        return self.messages or (Message(role="user", content=(*self.media, self.question)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """One image or video after the Hugging Face processor."""

    kind: Literal["video", "image"]
    patches: torch.Tensor
    """[num_patches, channels * temporal_patch * patch * patch] float32, in the processor's order."""
    grid_thw: tuple[int, int, int]
    """Grid in patches: temporal steps, rows, columns."""
    seconds_per_grid: float
    """Seconds between temporal grid steps; 0.0 for an image."""
    content_hash: int
    """Stable 62-bit hash of the patches: equal media share prefix cache entries in the rollout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A sample as the model sees it. Token ids are final: nothing is re-tokenised later."""

    sample: Sample
    token_ids: tuple[int, ...]
    """Chat template applied, media placeholders expanded to one token per merged patch."""
    media: tuple[Media, ...]
    """In the order of their placeholders in `token_ids`."""
