"""Lengths of benchmark workloads."""

from __future__ import annotations

import random
import statistics

import pytest

from rollplex_cli.plan.workloads import MAX_RESPONSE_TOKENS, WORKLOADS


@pytest.mark.parametrize("name", WORKLOADS)
def test_medians_and_limits_hold(name: str) -> None:
    workload, rng = WORKLOADS[name], random.Random(3)
    prompts = [workload.draw_prompt_tokens(rng, 16384) for _ in range(2000)]
    responses = [workload.draw_response_tokens(rng, MAX_RESPONSE_TOKENS) for _ in range(2000)]
    assert statistics.median(prompts) == pytest.approx(workload.prompt_tokens, rel=0.05)
    assert statistics.median(responses) == pytest.approx(workload.response_tokens, rel=0.1)
    assert min(responses) >= 1 and max(responses) <= MAX_RESPONSE_TOKENS
    share = sum(prompts) / (sum(prompts) + sum(responses))
    assert (0.7 < share < 0.99) if workload.video else share < 0.2


def test_a_small_limit_scales_the_whole_distribution() -> None:
    workload, rng = WORKLOADS["llava-video"], random.Random(3)
    prompts = [workload.draw_prompt_tokens(rng, 500) for _ in range(500)]
    responses = [workload.draw_response_tokens(rng, 16) for _ in range(500)]
    assert max(prompts) <= 500 and len(set(prompts)) > 50
    assert max(responses) <= 16 and len(set(responses)) > 8
