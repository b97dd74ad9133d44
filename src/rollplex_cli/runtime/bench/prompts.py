"""Prompts and rewards of a benchmark's workload, made on the spot.

A video is patch values drawn from a normal distribution, as the processor's normalised pixels are spread; from there on
everything is real: vision tower, placeholders, positions, caches.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

import torch

from rollplex_cli.core.seeds import derive_seed
from rollplex_cli.data.types import Media, Prompt, Sample
from rollplex_cli.engines.inputs import build_prompt_input
from rollplex_cli.plan.workloads import MIN_TEXT_TOKENS
from rollplex_cli.profile.schema import RewardProfile
from rollplex_cli.rl.rewards.guard import RewardResult
from rollplex_cli.rl.rewards.scorer import Scorer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex_cli.engines.inputs import MediaTokens, PromptInput
    from rollplex_cli.plan.workloads import Workload
    from rollplex_cli.runtime.assembly.rank import Rank

CHANNELS = 3
SECONDS_PER_GRID = 1.0
LARGE_FRAME, SMALL_FRAME = (16, 22), (4, 4)
"""Rows and columns of a frame in patches; the small one where a video has few tokens."""
WORDS = range(16, 200)
"""Token ids of the text: ordinary words of every tokenizer."""


def draw_inputs(rank: Rank, workload: Workload, step: int, count: int) -> list[PromptInput]:
    """This rank's prompts of a step; a function of the run's seed, step and global group."""
    return [_draw(rank, workload, step, rank.first_group + group) for group in range(count)]


def longest_inputs(rank: Rank, step: int, count: int) -> list[PromptInput]:
    """This rank's prompts of a step, each one video of as many tokens as the profile allows a prompt."""
    inputs = []
    for group in range(count):
        seed = derive_seed(rank.profile.runtime.seed, "longest", step, rank.first_group + group)
        # One of the tokens below opens the video and comes on top.
        length = rank.profile.data.max_prompt_tokens - 1
        name = f"longest-{step}-{rank.first_group + group}"
        inputs.append(_build(rank, random.Random(seed), length, seed, name, video=True))
    return inputs


def _draw(rank: Rank, workload: Workload, step: int, group: int) -> PromptInput:
    seed = derive_seed(rank.profile.runtime.seed, "workload", step, group)
    rng = random.Random(seed)
    length = workload.draw_prompt_tokens(rng, rank.profile.data.max_prompt_tokens)
    return _build(rank, rng, length, seed, f"{workload.name}-{step}-{group}", video=workload.video)


def _build(rank: Rank, rng: random.Random, length: int, seed: int, name: str, *, video: bool) -> PromptInput:
    tokens = rank.media_tokens
    text = [rng.choice(WORDS) for _ in range(length)]
    sample = Sample(sample_id=name, question="", answer="", kind=name.rsplit("-", 2)[0])
    if not video or length < MIN_TEXT_TOKENS:
        return build_prompt_input(Prompt(sample=sample, token_ids=tuple(text), media=()), tokens)
    room = length - MIN_TEXT_TOKENS
    merged = tokens.merge_size**2
    rows, columns = LARGE_FRAME if room > LARGE_FRAME[0] * LARGE_FRAME[1] // merged * 2 else SMALL_FRAME
    steps = max(1, room * merged // (rows * columns))
    media = _video(tokens, (steps, rows, columns), seed)
    placeholders = [tokens.video_token_id] * (steps * rows * columns // merged)
    before, after = text[: MIN_TEXT_TOKENS // 2], text[: max(1, room - len(placeholders) + MIN_TEXT_TOKENS // 2)]
    ids = (*before, tokens.vision_start_token_id, *placeholders, *after)
    return build_prompt_input(Prompt(sample=sample, token_ids=ids, media=(media,)), tokens)


def _video(tokens: MediaTokens, grid: tuple[int, int, int], seed: int) -> Media:
    width = CHANNELS * tokens.temporal_patch_size * tokens.patch_size**2
    patches = torch.randn(grid[0] * grid[1] * grid[2], width, generator=torch.Generator().manual_seed(seed))
    if torch.cuda.is_available():
        patches = patches.pin_memory()
    return Media(kind="video", patches=patches, grid_thw=grid, seconds_per_grid=SECONDS_PER_GRID, content_hash=seed)


class CoinFlips(Scorer):
    """In place of the run's reward: 0 or 1 for each response, whatever it says.

    The n-th response to a sample gets the same reward under every schedule.
    """

    def __init__(self, group_size: int) -> None:
        super().__init__(RewardProfile(), lambda _sample, _text, _finished: 0.0)
        self._group_size = group_size
        self._seen: Counter[str] = Counter()

    def score(self, sample: Sample, texts: Sequence[str], finished: Sequence[bool]) -> list[RewardResult]:
        """One reward per response."""
        del finished
        return [self._flip(sample.sample_id) for _ in texts]

    def _flip(self, sample_id: str) -> RewardResult:
        index = self._seen[sample_id] % self._group_size
        self._seen[sample_id] += 1
        value = float(derive_seed(0, f"reward/{sample_id}", index) % 2)
        return RewardResult(total=value, parts={"coin": value})
