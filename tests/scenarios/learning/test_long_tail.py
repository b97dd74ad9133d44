"""Groups in excess: steps do not wait for long responses, no prompt is lost, and schedules still agree bit by bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from scenarios.support import prepare_run, run_script

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder

STEPS = 5
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def results(prepared: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    settings = (
        "rollout.max_new_tokens=48", "optimizer.lr=1e-3", "data.max_prompt_tokens=256",
        "schedule.prefix_activations=recompute",
    )  # fmt: skip
    run = prepare_run(tmp_path_factory.mktemp("tail") / "run", prepared, *settings)
    script = Path(__file__).parent / "long_tail.py"
    found, said = run_script(script, run.root, STEPS)
    print(said[-400:])
    return found


def test_schedules_agree(results: dict[str, Any]) -> None:
    for case, schedules in results.items():
        one, other = ({k: v for k, v in s.items() if k not in ("group_s", "step_s")} for s in schedules.values())
        assert one == other, case


def test_no_group_is_lost_or_taken_twice(results: dict[str, Any]) -> None:
    for case in ("extra groups", "partial"):
        numbers = results[case]["rollplex"]["numbers"]
        assert len(set(numbers)) == len(numbers)
        assert len(numbers) >= 4 * STEPS
        # A long one (number 3) is late, and waited for after being left twice.
        assert 3 in numbers
        assert numbers.index(3) >= 8
    assert results["plain"]["rollplex"]["numbers"] == list(range(4 * STEPS))


def test_kept_tokens_are_stale_and_fresh_ones_agree(results: dict[str, Any]) -> None:
    for case in ("plain", "extra groups"):
        assert all(row["stale_token_share"] == 0 for row in results[case]["rollplex"]["rows"])
    # Stale vision features would be those of other weights, and show in the fresh tokens' log-probs.
    for case in ("partial", "partial, masked", "partial, rollout's vision"):
        rows = results[case]["rollplex"]["rows"]
        assert any(row["stale_token_share"] > 0 for row in rows)
        assert all(row["logprob_diff_mean"] < 1e-4 for row in rows)
    assert len({found["rollplex"]["weights"] for found in results.values()}) == len(results)
