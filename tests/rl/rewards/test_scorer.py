"""Weighted sums and users' functions in worker processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from rollplex_cli.core.errors import RewardError, UsageError
from rollplex_cli.data.types import Sample
from rollplex_cli.profile.schema import RewardProfile
from rollplex_cli.rl.rewards.scorer import Scorer

if TYPE_CHECKING:
    from pathlib import Path

FILE = """
import asyncio, os, threading, time
import neighbour

class Mine:
    pass

def length(sample, text, finished):
    return len(text) * neighbour.SCALE + (sample.answer == text)

def parts(sample, text, finished):
    return {"a": 0.25, "b": 0.5}

async def later(sample, text, finished):
    await asyncio.sleep(0.01)
    return 0.5

def misbehave(sample, text, finished):
    if text == "hang":
        time.sleep(60)
    if text == "die":
        os._exit(3)
    if text == "raise":
        raise KeyError("mine")
    if text == "lock":
        return threading.Lock()
    if text == "mine":
        return Mine()
    return "text" if text == "text" else float("nan") if text == "nan" else 1.0

def narrow(sample):
    return 1.0
"""
SAMPLE = Sample(sample_id="row-7", question="?", answer="B", kind="multiple choice")


def no_task(*_: Any) -> float:
    raise AssertionError("not asked")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reward")
    (folder / "neighbour.py").write_text("SCALE = 0.1\n", encoding="utf-8")
    path = folder / "mine.py"
    path.write_text(FILE, encoding="utf-8")
    return path


def test_without_parts_the_task_is_asked() -> None:
    scorer = Scorer(RewardProfile(), lambda *given: {"exact": 0.9, "format": 0.1 * given[2]})
    [first, second] = scorer.score(SAMPLE, ["x", "y"], [True, False])
    assert (first.total, second.parts) == (1.0, {"exact": 0.9, "format": 0.0})


def test_weighted_sum_with_its_parts() -> None:
    scorer = Scorer(RewardProfile(parts={"multiple_choice": 0.8, "format": 0.2}), no_task)
    results = scorer.score(SAMPLE, ["<answer>b</answer>", "so <answer>b</answer>", "<answer>A</answer>"], [True] * 3)
    assert [r.total for r in results] == pytest.approx([1.0, 0.8, 0.2])
    assert results[1].parts == {"multiple_choice": 0.8, "format": 0.0}


def test_functions_of_ones_own(file: Path) -> None:
    profile = RewardProfile(parts={f"{file}:length": 1.0, f"{file}:later": 2.0, f"{file}:parts": 1.0, "math": 1.0})
    scorer = Scorer(profile, no_task)
    try:
        results = scorer.score(SAMPLE, ["B", "four"], [True, True])
    finally:
        scorer.close()
    first = dict(results[0].parts)
    assert first.pop("math") == 0.0
    assert first == pytest.approx({"length": 1.1, "later": 1.0, "parts.a": 0.25, "parts.b": 0.5})
    assert results[1].total == pytest.approx(0.4 + 1.0 + 0.75)


def test_faults_are_named_and_cost_one_call(file: Path) -> None:
    scorer = Scorer(RewardProfile(parts={f"{file}:misbehave": 1.0}, num_workers=1, timeout_s=0.5), no_task)
    try:
        for text, message in {
            "raise": r"`.*mine.py:misbehave` of sample `row-7` raised KeyError: 'mine'",
            "text": "returned text, not a number",
            "nan": "not finite",
            "lock": "raised TypeError: cannot pickle",
            "mine": "raised its answer cannot be read",
            "die": "ended with code: 3",
        }.items():
            with pytest.raises(RewardError, match=message):
                scorer.score(SAMPLE, [text], [True])
        started = time.monotonic()
        with pytest.raises(RewardError, match=r"did not return within `reward\.timeout_s`: 0\.5 s"):
            scorer.score(SAMPLE, ["hang"], [True])
        assert time.monotonic() - started < 10
        assert scorer.score(SAMPLE, ["fine"], [True])[0].total == 1.0
    finally:
        scorer.close()


def test_failed_calls_can_count_zero(file: Path) -> None:
    scorer = Scorer(RewardProfile(parts={f"{file}:misbehave": 1.0}, on_error="zero"), no_task)
    try:
        results = scorer.score(SAMPLE, ["raise", "fine"], [True, True])
    finally:
        scorer.close()
    assert [r.total for r in results] == [0.0, 1.0]
    assert scorer.num_errors == 1


def test_a_built_in_type_that_runs_too_long_costs_the_response_only() -> None:
    # A worker's first call imports what it needs, which takes longer than this.
    scorer = Scorer(RewardProfile(parts={"math": 0.75, "format": 0.25}, num_workers=1, timeout_s=0.01), no_task)
    try:
        [result] = scorer.score(SAMPLE, ["<answer>9^{9^{9^9}}</answer>"], [True])
    finally:
        scorer.close()
    assert result.parts == {"math": 0.0, "format": 0.25}
    assert scorer.num_errors == 1


def test_what_does_not_load_is_said_at_the_start(file: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n", encoding="utf-8")
    for name, message in {
        "accuracy": "no such reward type: accuracy",
        f"{tmp_path}/none.py:f": "no such reward file",
        f"{file}:nothing": "no function `nothing`",
        f"{file}:narrow": "must be callable as",
        f"{tmp_path}/broken.py:f": "ModuleNotFoundError",
    }.items():
        with pytest.raises(UsageError, match=message):
            Scorer(RewardProfile(parts={name: 1.0}), no_task)
