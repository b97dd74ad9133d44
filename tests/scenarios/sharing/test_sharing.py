"""Measuring what overlap gains, and deciding by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from scenarios.support import adopt, run_script_on_ranks, small

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.profile.dump import resolved_yaml
from rollplex_cli.profile.load import load_profile

pytestmark = pytest.mark.scenario


def test_auto_measures_at_the_runs_batches_and_then_steps(
    prepared: RunFolder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two ranks that share a training group: each decodes two of the four groups, and they decide alike."""
    run = RunFolder(tmp_path_factory.mktemp("sharing"))
    run.make()
    overrides = small("schedule.calibration_s=0.2", "topology.ranks_per_node=2", "topology.train_tp=2")
    run.profile.write_text(resolved_yaml(load_profile("tiny", overrides)), encoding="utf-8")
    adopt(run, prepared)
    ranks = run_script_on_ranks(2, Path(__file__).with_name("calibrate_on_cpu.py"), run.root, timeout_s=240)
    [first, second] = [found for found, _ in ranks]
    assert first["batches"] == [8]
    assert len(first["efficiencies"]) == 3 and min(first["efficiencies"]) > 0
    assert [choice["batch"] for choice in first["choices"]] == [8]
    for choice in first["choices"]:
        assert choice["overlap"] == (choice["efficiency"] >= 1.02)
    assert first["step"] == 1
    assert 0 in first["entered"]
    assert (second["efficiencies"], second["choices"]) == (first["efficiencies"], first["choices"])
