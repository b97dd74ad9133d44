"""Work that is left out leaves no trace in the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scenarios.support import prepare_run, run_script

from rollplex_cli.core.paths import RunFolder

pytestmark = pytest.mark.scenario
STEPS = 3


def run(root: Path, prepared: RunFolder, *overrides: str) -> dict[str, Any]:
    """The results of every case of the script, from a job with these settings."""
    run = prepare_run(root, prepared, "schedule.prefix_activations=recompute", *overrides)
    script = Path(__file__).with_name("reuse_equality.py")
    return run_script(script, run.root, STEPS, timeout_s=240)[0]


@pytest.fixture(scope="module")
def results(prepared: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Everything is trained, without a KL term."""
    return run(tmp_path_factory.mktemp("reuse"), prepared, "algorithm.kl_coef=0")


@pytest.fixture(scope="module")
def frozen(prepared: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The vision tower is frozen, with a KL term."""
    return run(tmp_path_factory.mktemp("frozen"), prepared, "model.freeze_vision=true", "algorithm.kl_coef=0.05")


def test_groups_without_a_gradient_are_left_out_exactly(results: dict[str, Any]) -> None:
    everything, left_out = results["everything"], results["zero advantages left out"]
    assert max(left_out["skipped"]) > 0 and max(everything["skipped"]) == 0
    for name in ("losses", "grad_norms", "weights"):
        assert left_out[name] == everything[name]
    assert len(set(everything["grad_norms"])) == STEPS


@pytest.mark.parametrize("name", ["the same, serial", "the same, colocate"])
def test_policy_and_schedule_change_nothing(results: dict[str, Any], name: str) -> None:
    # Whether a group's prefix has run before its rewards are known to be equal is a matter of time.
    assert {**results[name], "runs": None} == {**results["zero advantages left out"], "runs": None}


def test_the_rollouts_prefix_differs_by_rounding_only(results: dict[str, Any]) -> None:
    own, taken = results["everything"], results["rollout's prefix"]
    assert taken["losses"] == pytest.approx(own["losses"], abs=1e-5)
    assert taken["grad_norms"] == pytest.approx(own["grad_norms"], rel=1e-3)
    assert max(taken["diff_mean"]) < 1e-5
    assert taken["weights"] != own["weights"]
    assert taken == results["rollout's prefix, colocate"]


def close(found: dict[str, Any], own: dict[str, Any]) -> None:
    """Equal but for the rounding of other kernels."""
    assert found["losses"] == pytest.approx(own["losses"], abs=1e-5)
    assert found["grad_norms"] == pytest.approx(own["grad_norms"], rel=1e-3)
    assert found["kl"] == pytest.approx(own["kl"], abs=1e-5)
    assert max(found["diff_mean"]) < 1e-5


def test_a_trained_tower_runs_once_for_rollout_and_the_actors_forward(results: dict[str, Any]) -> None:
    own, taken = results["everything"], results["rollout's vision"]
    close(taken, own)
    # The actor's patches are embedded in its forward, in the recomputation, and in the stage's own backward.
    assert own["runs"] == {"rollout": 1, "trainer": 3}
    assert taken["runs"] == {"rollout": 1, "trainer": 2}
    assert taken == results["rollout's vision, serial"] == results["rollout's vision, colocate"]


def test_a_frozen_tower_runs_once_for_reference_and_actor_exactly(frozen: dict[str, Any]) -> None:
    own, shared = frozen["everything"], frozen["one run for both"]
    assert own["runs"] == {"rollout": 1, "trainer": 3}  # reference, actor, and the actor's recomputation
    assert shared["runs"] == {"rollout": 1, "trainer": 1}
    assert shared == frozen["one run for both, colocate"]
    assert {**shared, "runs": None} == {**own, "runs": None}
    assert max(own["kl"]) > 0 and len(set(own["losses"])) == STEPS


def test_a_frozen_tower_runs_once_for_all_three(frozen: dict[str, Any]) -> None:
    taken = frozen["rollout's vision"]
    close(taken, frozen["everything"])
    assert taken["runs"] == frozen["rollout's vision and prefix"]["runs"] == {"rollout": 1, "trainer": 0}
    assert taken == frozen["rollout's vision, serial"] == frozen["rollout's vision, colocate"]
    close(frozen["rollout's vision and prefix"], frozen["everything"])


def test_groups_that_share_a_pass_share_that_of_a_frozen_tower_exactly(frozen: dict[str, Any]) -> None:
    own, shared = frozen["packed, everything"], frozen["packed, one run for both"]
    assert own["runs"] == {"rollout": 1, "trainer": 3}
    assert shared["runs"] == {"rollout": 1, "trainer": 1}
    assert shared == frozen["packed, one run for both, colocate"]
    assert {**shared, "runs": None} == {**own, "runs": None}
    assert own["weights"] != frozen["everything"]["weights"]  # other products
    close(own, frozen["everything"])


@pytest.mark.parametrize("name", ["packed, rollout's vision", "packed, one run and the rollout's prefix"])
def test_what_the_rollout_gives_is_taken_beside_passes(frozen: dict[str, Any], name: str) -> None:
    close(frozen[name], frozen["everything"])
    assert frozen[name]["runs"] == {"rollout": 1, "trainer": 0 if "vision" in name else 1}
