"""Measuring what overlap gains, and deciding by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenarios.support import adopt, run_script, small

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.profile.dump import resolved_yaml
from rollplex_cli.profile.load import load_profile

pytestmark = pytest.mark.scenario


def test_auto_measures_at_the_runs_batches_and_then_steps(
    prepared: RunFolder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = RunFolder(tmp_path_factory.mktemp("sharing"))
    run.make()
    run.profile.write_text(resolved_yaml(load_profile("tiny", small("schedule.calibration_s=0.2"))), encoding="utf-8")
    adopt(run, prepared)
    script = Path(__file__).with_name("calibrate_on_cpu.py")
    found, _ = run_script(script, run.root, timeout_s=240)
    assert found["batches"] == [8, 16]
    assert len(found["efficiencies"]) == 6 and min(found["efficiencies"]) > 0
    assert [choice["batch"] for choice in found["choices"]] == [8, 16]
    for choice in found["choices"]:
        assert choice["overlap"] == (choice["efficiency"] >= 1.02)
    assert found["step"] == 1
    assert 0 in found["entered"]
