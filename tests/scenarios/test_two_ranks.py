"""Two data-parallel ranks: the same results under both schedules, and those of one rank up to rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from scenarios.support import ALONE, metrics, rollplex, sets, small, train

if TYPE_CHECKING:
    from pathlib import Path

    from rollplex_cli.core.paths import RunFolder

STEPS = 4


def results(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: row[k] for k in ("loss", "grad_norm", "reward_mean", "kl", "logprob_diff_max")} for row in rows]


@pytest.mark.scenario
@pytest.mark.timeout(300)
def test_two_ranks_give_the_same_under_both_schedules_and_as_one_rank(
    prepared: RunFolder, alone: RunFolder, tmp_path: Path
) -> None:
    job = ("model.init=checkpoint", f"model.config={prepared.base_dir}", *ALONE, f"runtime.max_steps={STEPS}")
    command = ["train", "--profile", "tiny-2rank", "--run-dir", str(tmp_path / "a"), "--plain", "--schedule"]
    done = rollplex(*command, "rollplex", *sets(small(*job)))
    assert done.returncode == 0, done.stderr[-2000:]
    overlapped = results(metrics(tmp_path / "a"))
    assert overlapped == results(train(tmp_path / "b", *job, "schedule.name=colocate", profile="tiny-2rank"))
    assert len(overlapped) == STEPS
    for two, one in zip(overlapped, metrics(alone.root), strict=False):
        assert two["loss"] == pytest.approx(one["loss"], abs=1e-4)
        assert two["reward_mean"] == pytest.approx(one["reward_mean"], abs=1e-6)
        assert two["logprob_diff_max"] < 1e-4
