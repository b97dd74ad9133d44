"""The one description of a prompt that rollout, reference and trainer all read.

Positions are computed once, here, and handed to every engine: the engines' own versions disagree for video.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from rollplex_cli.data.types import Prompt


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
