"""Every algorithm trains over real engines, and gives the same bits under both schedules."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from scenarios.support import prepare_run, run_script

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder

STEPS = 2


@pytest.fixture(scope="module")
def results(prepared: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = prepare_run(tmp_path_factory.mktemp("algorithms") / "run", prepared, "optimizer.lr=3e-3")
    script = Path(__file__).parent / "algorithms.py"
    found: dict[str, Any] = run_script(script, run.root, STEPS)[0]["results"]
    return found


@pytest.mark.scenario
def test_schedules_give_the_same_bits(results: dict[str, Any]) -> None:
    for case, schedules in results.items():
        assert schedules["colocate"] == schedules["rollplex"], case


@pytest.mark.scenario
def test_algorithms_differ_and_stay_on_policy(results: dict[str, Any]) -> None:
    weights = {case: found["rollplex"]["weights"] for case, found in results.items()}
    # On policy no ratio leaves its limits, and here no group is without signal.
    assert weights.pop("dapo") == weights["grpo"]
    assert len(set(weights.values())) == len(weights)
    for case, found in results.items():
        assert found["rollplex"]["diff_max"] < 1e-4, case
        for row in found["rollplex"]["rows"]:
            assert all(math.isfinite(value) for value in row.values()), case
            assert row["grad_norm"] > 0, case


@pytest.mark.scenario
def test_several_updates_keep_the_old_logprobs(results: dict[str, Any]) -> None:
    for case, updates in {"grpo": 1, "ppo": 4, "ppo, old from rollout": 4}.items():
        assert results[case]["rollplex"]["updates"] == updates
        assert results[case]["rollplex"]["old_kept"]
    # Steps this large leave the limits within a rollout; a single update never can.
    assert max(row["clip_fraction"] for row in results["ppo"]["rollplex"]["rows"]) > 0
    assert max(row["clip_fraction"] for row in results["grpo"]["rollplex"]["rows"]) == 0
