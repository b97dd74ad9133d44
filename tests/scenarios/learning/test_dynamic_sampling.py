"""Dynamic sampling: batches are filled with groups that carry a signal, the same ones whatever else differs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from scenarios.support import run_script

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder

SHARE, GROUP_SIZE, REFILLS = 4, 4, 2
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def results(prepared: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script, folder = Path(__file__).parent / "dynamic_sampling.py", tmp_path_factory.mktemp("dynamic")
    found, said = run_script(script, prepared.root, folder)
    return {**found, "log": said}


def groups_of(result: dict[str, Any], step: int) -> list[list[float]]:
    """Rewards of each group of a step."""
    rewards = [reward for number, _, reward in result["samples"] if number == step]
    return [rewards[i : i + GROUP_SIZE] for i in range(0, len(rewards), GROUP_SIZE)]


def test_schedules_workers_and_restarts_change_no_bit(results: dict[str, Any]) -> None:
    assert results["plain"] == results["colocate, resumed"]
    assert results["in excess"] == results["in excess, colocate"]


def test_batches_are_filled(results: dict[str, Any]) -> None:
    refilled = 0
    for row in results["plain"]["rows"]:
        groups = groups_of(results["plain"], row["step"])
        kept = [group for group in groups if len(set(group)) > 1]
        assert (row["num_groups"], row["kept_groups"]) == (len(groups), len(kept))
        assert row["num_groups"] == SHARE + row["refilled_groups"]
        assert len(kept) <= SHARE and len(groups) <= SHARE * (1 + REFILLS)
        # A place is given up only after all its refills.
        assert row["refilled_groups"] >= REFILLS * (SHARE - len(kept))
        refilled += row["refilled_groups"]
        short = f"step {row['step']} trained on {len(kept)} groups instead of {SHARE}"
        assert (short in results["log"]) == (len(kept) < SHARE)
    full = [row for row in results["plain"]["rows"] if row["kept_groups"] == SHARE]
    assert refilled > 0 and full
    assert any(row["refilled_groups"] for row in full)


def test_no_sample_is_lost_or_taken_twice(results: dict[str, Any]) -> None:
    taken = [sample for _, sample, _ in results["plain"]["samples"][::GROUP_SIZE]]
    assert sorted(taken) == sorted(results["plain"]["line"][: len(taken)])
    assert len(taken) == sum(row["num_groups"] for row in results["plain"]["rows"])


def test_with_groups_in_excess_a_step_ends_with_its_share(results: dict[str, Any]) -> None:
    for row in results["in excess"]["rows"]:
        kept = [group for group in groups_of(results["in excess"], row["step"]) if len(set(group)) > 1]
        assert row["kept_groups"] == len(kept)
    assert any(row["kept_groups"] >= SHARE and row["refilled_groups"] for row in results["in excess"]["rows"])
