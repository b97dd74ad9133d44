"""Multimodal rotary positions (M-RoPE) of a prompt, for rollout, reference and trainer alike.

The scheme is that of Qwen2-VL (arXiv 2409.12191, section 2.1) with the absolute time of Qwen2.5-VL
(arXiv 2502.13923, section 2.1.2):

- a text token has one position on all three axes (temporal, row, column);
- a patch at grid step t, row y, column x of a medium whose first token would have position s has
  (s + floor(t * seconds_per_grid * tokens_per_second), s + y, s + x);
- what follows a medium continues at the largest position so far, plus one.

Families without absolute time (Qwen2-VL) count temporal steps instead: t in place of the floor. Those that write the
time into the text (Qwen3-VL) have one medium per temporal step, so that t is 0 throughout.

Engines differ in the second and third rule for video, so they are given these positions and compute none.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_ROUNDING = 1e-6
"""Relative distance to the next integer that counts as rounding. A float32 clock is good to 6e-8."""


class MediaGrid(Protocol):
    """What positions need to know of a medium; `data.types.Media` has it."""

    @property
    def kind(self) -> Literal["video", "image"]:
        """Which placeholder token stands for it."""

    @property
    def grid_thw(self) -> tuple[int, int, int]:
        """Grid in patches, before merging: temporal steps, rows, columns."""

    @property
    def seconds_per_grid(self) -> float:
        """Seconds between temporal steps; 0.0 for an image."""


class MropePositions(NamedTuple):
    """Positions of the P tokens of a prompt."""

    position_ids: torch.Tensor
    """[3, P] int64: temporal, row and column axis."""
    rope_delta: int
    """Largest position + 1 - P: generated token i has position P + i + rope_delta on all axes."""
    media_spans: tuple[tuple[int, int], ...]
    """First and last placeholder index (inclusive) of each medium, in order."""


def temporal_positions(num_steps: int, seconds_per_grid: float, tokens_per_second: float | None) -> list[int]:
    """floor(t * seconds_per_grid * tokens_per_second) for t in 0..num_steps-1; t itself where there is no rate.

    A product within rounding of an integer is that integer: at 3 sampled frames per second 2/3 s per grid step has
    no exact float, and a plain floor of 3 * (2/3) * 2 would depend on the precision it was computed in (3 or 4).
    At 6 frames per second and 2 tokens per second (2/3 position a step) neighbouring steps share a position:
    0 0 1 2 2 3. Truncating seconds_per_grid to an integer first would give every step position 0.
    """
    if tokens_per_second is None:
        return list(range(num_steps))
    rate = seconds_per_grid * tokens_per_second
    return [_floor(step * rate) for step in range(num_steps)]


def num_media_tokens(grid_thw: tuple[int, int, int], merge_size: int) -> int:
    """Placeholder tokens of a medium: one per merge_size x merge_size patches.

    Raises:
        ValueError: for an empty grid or rows or columns that merging does not divide.
    """
    steps, rows, columns = grid_thw
    if min(grid_thw) < 1 or rows % merge_size or columns % merge_size:
        raise ValueError(f"grid does not divide into {merge_size}x{merge_size} blocks: {grid_thw}")
    return steps * (rows // merge_size) * (columns // merge_size)


def mrope_positions(
    token_ids: Sequence[int],
    media: Sequence[MediaGrid],
    *,
    image_token_id: int,
    video_token_id: int,
    vision_start_token_id: int,
    merge_size: int,
    tokens_per_second: float | None,
) -> MropePositions:
    """Positions of a prompt whose media placeholders are already expanded.

    Args:
        token_ids: P ids; each medium is a run of its placeholder id behind `vision_start_token_id`.
        media: in the order of their placeholders.
        merge_size: patches per token along rows and columns.
        tokens_per_second: temporal positions per second of video; None counts temporal steps.

    Raises:
        ValueError: where placeholders and media do not match one to one, in kind and in number.
    """
    placeholder = {"image": image_token_id, "video": video_token_id}
    chunks: list[torch.Tensor] = []
    spans: list[tuple[int, int]] = []
    position = index = 0
    for number, medium in enumerate(media):
        first = _next_placeholder(token_ids, index, placeholder)
        count = num_media_tokens(medium.grid_thw, merge_size)
        _check_run(token_ids, first, count, number, placeholder[medium.kind], vision_start_token_id)
        chunks.append(_text(position, first - index))
        chunk = _grid(position + first - index, medium, merge_size, tokens_per_second)
        chunks.append(chunk)
        spans.append((first, first + count - 1))
        position, index = int(chunk.max()) + 1, first + count
    rest = _next_placeholder(token_ids, index, placeholder)
    if rest < len(token_ids):
        raise ValueError(f"placeholder without a medium at token: {rest}")
    chunks.append(_text(position, len(token_ids) - index))
    position_ids = torch.cat(chunks, dim=1)
    assert position_ids.shape == (3, len(token_ids))
    end = position + len(token_ids) - index
    return MropePositions(position_ids, end - len(token_ids), tuple(spans))


def _floor(value: float) -> int:
    nearest = round(value)
    close = abs(value - nearest) <= _ROUNDING * max(1.0, abs(value))
    return nearest if close else math.floor(value)


def _next_placeholder(token_ids: Sequence[int], start: int, placeholder: dict[str, int]) -> int:
    ids = set(placeholder.values())
    return next((i for i in range(start, len(token_ids)) if token_ids[i] in ids), len(token_ids))


def _check_run(
    token_ids: Sequence[int], first: int, count: int, number: int, placeholder_id: int, vision_start_token_id: int
) -> None:
    run = 0
    while first + run < len(token_ids) and token_ids[first + run] == placeholder_id:
        run += 1
    if run != count:
        raise ValueError(f"medium {number} needs {count} placeholders of id {placeholder_id}, got: {run}")
    if first == 0 or token_ids[first - 1] != vision_start_token_id:
        raise ValueError(f"no vision start token ({vision_start_token_id}) before medium: {number}")


def _text(start: int, length: int) -> torch.Tensor:
    return torch.arange(start, start + length, dtype=torch.int64).expand(3, -1)


def _grid(start: int, medium: MediaGrid, merge_size: int, tokens_per_second: float | None) -> torch.Tensor:
    steps, rows, columns = medium.grid_thw
    seconds = medium.seconds_per_grid if medium.kind == "video" else 0.0
    axes = torch.meshgrid(
        torch.tensor(temporal_positions(steps, seconds, tokens_per_second), dtype=torch.int64),
        torch.arange(rows // merge_size, dtype=torch.int64),
        torch.arange(columns // merge_size, dtype=torch.int64),
        indexing="ij",
    )
    return torch.stack([axis.flatten() for axis in axes]) + start
