"""Invariant 6: schedules, early groups, prefixes in flight, residency and wall clock change no bit of a result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from scenarios.support import prepare_run, run_script

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder

STEPS = 20


@pytest.mark.scenario
@pytest.mark.timeout(600)
def test_twenty_steps_are_bit_equal_under_every_schedule(prepared: RunFolder, tmp_path: Path) -> None:
    run = prepare_run(tmp_path / "run", prepared)
    script = Path(__file__).parent / "schedule_equality.py"
    results = run_script(script, run.root, STEPS, timeout_s=580)[0]["results"]
    reference = results["colocate"]
    # The run learns something: it is no comparison of zeros.
    assert {int(step): found["distinct_losses"] for step, found in reference.items()} == {8: 8, STEPS: STEPS}
    assert reference[str(STEPS)]["diff_max"] < 1e-4
    packed = results["packed colocate"]
    for name, result in results.items():
        assert result
        for step, found in result.items():
            assert found == (packed if name.startswith("packed") else reference)[step], (name, step)
    # Other sums of the same numbers.
    assert packed["8"]["largest_pack"] > 1 == reference["8"]["largest_pack"]
    pairs = zip(packed["8"]["losses"], reference["8"]["losses"], strict=True)
    assert all(float.fromhex(a) == pytest.approx(float.fromhex(b), abs=1e-3) for a, b in pairs)
    assert sum(str(STEPS) in result for result in results.values()) >= 6
