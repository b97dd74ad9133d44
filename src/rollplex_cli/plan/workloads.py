"""Shapes of the workloads that benchmarks imitate: how long prompts and responses are.

Published (see the README's bench section): median prompts of 470 to 5,900 tokens over four video question sets, prompt
tokens 79 to 98 % of a sample, responses of at most 2,048 tokens; mathematics with prompts of 60 to 90 tokens that are
11 to 19 % of a sample. Assumed: which set has which median, the medians of responses that follow from the shares,
log-normal lengths, and the spread.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

PROMPT_SIGMA = 0.2
RESPONSE_SIGMA = 0.7
"""Standard deviations of the logarithms: the longest of 64 responses is about five times the median."""
MAX_RESPONSE_TOKENS = 2048
MIN_TEXT_TOKENS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Medians of one workload, in tokens."""

    name: str
    prompt_tokens: int
    response_tokens: int
    video: bool = True
    """Whether most of the prompt is one video; else text alone."""

    def draw_prompt_tokens(self, rng: random.Random, limit: int) -> int:
        """Length of a prompt; workloads too long for `limit` are scaled down to it as a whole."""
        scale = min(1.0, limit / (self.prompt_tokens * math.exp(2 * PROMPT_SIGMA)))
        length = self.prompt_tokens * math.exp(PROMPT_SIGMA * _normal(rng))
        return max(2, min(limit, round(scale * length)))

    def draw_response_tokens(self, rng: random.Random, limit: int) -> int:
        """Length of a response; scaled as a whole where `limit` is under four medians, else cut at it."""
        scale = min(1.0, limit / (4 * self.response_tokens))
        length = self.response_tokens * math.exp(RESPONSE_SIGMA * _normal(rng))
        return max(1, min(limit, MAX_RESPONSE_TOKENS, round(scale * length)))


def _normal(rng: random.Random) -> float:
    return max(-2.5, min(2.5, rng.gauss(0.0, 1.0)))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(name="star", prompt_tokens=470, response_tokens=125),
        Workload(name="clevrer", prompt_tokens=1100, response_tokens=130),
        Workload(name="perceptiontest", prompt_tokens=1900, response_tokens=130),
        Workload(name="llava-video", prompt_tokens=5900, response_tokens=140),
        Workload(name="math", prompt_tokens=75, response_tokens=430, video=False),
    )
}
