"""Work that is left out leaves no trace in the results."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scenarios.support import prepare_run

from rollplex_cli.core.paths import RunFolder

pytestmark = pytest.mark.scenario
STEPS = 3


@pytest.fixture(scope="module")
def results(prepared: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    run = prepare_run(
        tmp_path_factory.mktemp("reuse"), prepared, "algorithm.kl_coef=0", "schedule.prefix_activations=recompute"
    )
    script = Path(__file__).with_name("reuse_equality.py")
    done = subprocess.run(
        [sys.executable, str(script), str(run.root), str(STEPS)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_groups_without_a_gradient_are_left_out_exactly(results: dict[str, Any]) -> None:
    everything, left_out = results["everything"], results["zero advantages left out"]
    assert max(left_out["skipped"]) > 0 and max(everything["skipped"]) == 0
    for name in ("losses", "grad_norms", "weights"):
        assert left_out[name] == everything[name]
    assert len(set(everything["grad_norms"])) == STEPS


@pytest.mark.parametrize("name", ["the same, serial", "the same, colocate"])
def test_policy_and_schedule_change_nothing(results: dict[str, Any], name: str) -> None:
    assert results[name] == results["zero advantages left out"]


def test_the_rollouts_prefix_differs_by_rounding_only(results: dict[str, Any]) -> None:
    own, taken = results["everything"], results["rollout's prefix"]
    assert taken["losses"] == pytest.approx(own["losses"], abs=1e-5)
    assert taken["grad_norms"] == pytest.approx(own["grad_norms"], rel=1e-3)
    assert max(taken["diff_mean"]) < 1e-5
    assert taken["weights"] != own["weights"]
    assert taken == results["rollout's prefix, colocate"]
