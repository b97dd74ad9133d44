"""Two data-parallel ranks: the same results under both schedules, and those of one rank up to rounding."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from scenarios.support import ALONE, rollplex, sets, small

from rollplex_cli.core.paths import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 4


def losses(root: Path, prepared: RunFolder, schedule: str) -> list[dict[str, Any]]:
    base = ("model.init=checkpoint", f"model.config={prepared.base_dir}", *ALONE, f"runtime.max_steps={STEPS}")
    command = ["train", "--profile", "tiny-2rank", "--run-dir", str(root), "--plain", "--schedule", schedule]
    done = rollplex(*command, *sets(small(*base)))
    assert done.returncode == 0, done.stderr[-2000:]
    return rows(RunFolder(root))


def rows(run: RunFolder) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [{k: row[k] for k in ("loss", "grad_norm", "reward_mean", "kl", "logprob_diff_max")} for row in found]


@pytest.mark.scenario
@pytest.mark.timeout(300)
def test_two_ranks_give_the_same_under_both_schedules_and_as_one_rank(
    prepared: RunFolder, alone: RunFolder, tmp_path: Path
) -> None:
    overlapped = losses(tmp_path / "a", prepared, "rollplex")
    assert overlapped == losses(tmp_path / "b", prepared, "colocate")
    assert len(overlapped) == STEPS
    for two, one in zip(overlapped, rows(alone), strict=False):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
        assert two["reward_mean"] == pytest.approx(one["reward_mean"], abs=1e-6)
        assert two["logprob_diff_max"] < 1e-4
