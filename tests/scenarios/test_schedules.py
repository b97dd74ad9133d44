"""Invariant 6: schedules, early groups, prefixes in flight, residency and wall clock change no bit of a result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from scenarios.support import prepare_run

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder

STEPS = 20


@pytest.mark.scenario
@pytest.mark.timeout(600)
def test_twenty_steps_are_bit_equal_under_every_schedule(prepared: RunFolder, tmp_path: Path) -> None:
    run = prepare_run(tmp_path / "run", prepared)
    script = Path(__file__).parent / "schedule_equality.py"
    done = subprocess.run(
        [sys.executable, str(script), str(run.root), str(STEPS)],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout.strip().splitlines()[-1])["results"]
    reference = results["colocate"]
    assert reference["distinct_losses"] == STEPS  # the run learns something: it is no comparison of zeros
    assert reference["diff_max"] < 1e-4
    for name, result in results.items():
        assert result == reference, name
