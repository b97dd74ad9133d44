"""Packing the responses of one group behind their shared prefix.

The prefix holds prompt positions 0..P-2. The last prompt token opens each suffix, so only keys and values
cross the boundary: suffix i reads [last prompt token, r_0 .. r_{n-2}] and predicts [r_0 .. r_{n-1}].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedSuffix:
    """Responses of one group laid end to end; S is the total number of response tokens.

    `token_ids`, `targets`, `segments`: [S] int64; `position_ids`: [3, S] int64; `lengths`: tokens per response.
    """

    token_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    segments: torch.Tensor
    """Which response each row belongs to, 0..G-1, non-decreasing."""
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """S, the number of predicted tokens."""
        return int(self.targets.shape[0])


def pack_suffix(
    last_prompt_token: int,
    num_prompt_tokens: int,
    rope_delta: int,
    responses: Sequence[Sequence[int]],
) -> PackedSuffix:
    """Pack responses (token id lists, none empty) of one prompt of `num_prompt_tokens` tokens."""
    if not responses or any(len(r) == 0 for r in responses):
        raise ValueError("every response needs at least one token")
    tokens: list[int] = []
    targets: list[int] = []
    segments: list[int] = []
    positions: list[int] = []
    first = num_prompt_tokens - 1 + rope_delta
    for index, response in enumerate(responses):
        tokens += [last_prompt_token, *response[:-1]]
        targets += list(response)
        segments += [index] * len(response)
        positions += range(first, first + len(response))
    row = torch.tensor(positions, dtype=torch.int64)
    return PackedSuffix(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        position_ids=row.unsqueeze(0).expand(3, -1).contiguous(),
        segments=torch.tensor(segments, dtype=torch.int64),
        lengths=tuple(len(r) for r in responses),
    )


def suffix_mask(segments: torch.Tensor, num_prefix_tokens: int) -> torch.Tensor:
    """Attention mask [S, num_prefix_tokens + S], True where a row may look: the whole prefix, and its own
    response up to itself."""
    order = torch.arange(segments.shape[0], device=segments.device)
    own = (segments.unsqueeze(1) == segments.unsqueeze(0)) & (order.unsqueeze(1) >= order.unsqueeze(0))
    prefix = own.new_ones((segments.shape[0], num_prefix_tokens))
    return torch.cat([prefix, own], dim=1)
