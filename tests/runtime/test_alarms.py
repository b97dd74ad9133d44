"""Rewards that teach nothing are said to be so."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.profile.load import load_profile
from rollplex_cli.runtime.loop import Progress, Run


def run_over(rewards: list[tuple[float, float]]) -> None:
    """The loop's account of steps with these means and deviations."""
    profile = load_profile("tiny", ["guards.zero_reward_steps=3"])
    run: Any = SimpleNamespace(rank=SimpleNamespace(profile=profile), progress=Progress(), _rollouts="rank0.jsonl")
    for step, (mean, std) in enumerate(rewards, start=1):
        Run._remember(run, {"step": step, "reward_mean": mean, "reward_std": std})
        Run._check_rewards(run, step, mean)


def test_zero_rewards_end_the_run() -> None:
    with pytest.raises(RunFailedError, match="every reward was zero for 3 steps in a row, up to step 5"):
        run_over([(0.0, 0.0), (0.1, 0.2), *[(0.0, 0.0)] * 3])


def test_constant_rewards_are_a_warning_each_time_anew(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run_over([(0.5, 0.1), *[(1.0, 0.0)] * 6, (0.5, 0.1), (1.0, 0.0)])
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "every reward was 1 for 3 steps in a row, up to step 4",
        "every reward was 1 for 6 steps in a row, up to step 7",
    ]


def test_rewards_that_differ_are_silent(caplog: pytest.LogCaptureFixture) -> None:
    run_over([(0.0, 0.0), (0.0, 0.3)] * 4)
    assert not caplog.records
