"""Managed memory in real runs: budgets, use outside of a lifetime, and nothing that grows."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from scenarios.support import go_on, prepare_run, rollplex, sets, small, train

from rollplex_cli.core.events import read_events
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.status import read_status
from rollplex_cli.launch.torchrun import WORKER
from rollplex_cli.profile.dump import resolved_yaml
from rollplex_cli.profile.load import load_profile
from rollplex_cli.report.memory.measured import measured_phases, memory_rows

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(300)]

STEPS = 12
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def trained(prepared: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of `STEPS` steps with a checkpoint at its end: nothing but training, so that memory has no reason
    to grow."""
    run = RunFolder(tmp_path_factory.mktemp("residency") / "run")
    base = ("model.init=checkpoint", f"model.config={prepared.base_dir}", f"runtime.max_steps={STEPS}")
    # Left alone the C library keeps up to 64 MiB of what was freed, and a dozen steps show little else.
    at_once = {"MALLOC_TRIM_THRESHOLD_": str(128 << 10)}
    done = rollplex(
        "train", "--profile", "tiny", "--run-dir", str(run.root), "--plain", *sets(small(*base)), env=at_once
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return run


def rewrite(run: RunFolder, *overrides: str) -> None:
    """Change a run's profile."""
    run.profile.write_text(resolved_yaml(load_profile(run.profile, list(overrides))))


def test_regions_hold_what_the_lifetime_table_says(trained: RunFolder) -> None:
    phases = measured_phases(trained)
    names = {phase: set(seen["objects"]) - {"reference_boundary", "actor_boundary"} for phase, seen in phases.items()}
    assert names["GENERATE"] == {"snapshot", "rollout_kv", "reference_weights"}
    assert names["LEARN"] == {"snapshot", "reference_weights", "gradients"}
    assert names["UPDATE"] == {"snapshot", "gradients"}
    assert names["PUBLISH"] == {"snapshot"}
    ends = [row for row in memory_rows(trained) if row["phase"] == "PUBLISH"]
    assert [row["step"] for row in ends] == list(range(1, STEPS + 1))
    assert all(set(row["regions"]) == {"snapshot"} for row in ends)


def test_nothing_grows(trained: RunFolder) -> None:
    tool = [sys.executable, str(ROOT / "tools" / "leak_check.py"), str(trained.root), "--after", "4", "--share", "0.05"]
    done = subprocess.run(tool, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_budget_too_small_ends_with_3_and_loses_nothing(trained: RunFolder) -> None:
    before, stored = sorted(path.name for path in trained.checkpoints_dir.iterdir()), trained.profile.read_text()
    rewrite(trained, "memory.budget_gib=0.009")
    # The rank itself, because a plan may refuse the job before any rank starts.
    done = warm.run_ranks(["-m", WORKER, trained.root], 1, timeout_s=120)[0]
    status = read_status(trained.status(0))
    assert done.returncode == 3
    assert status is not None and status.exit_code == 3
    assert "`rollout_kv` within `memory.budget_gib` wants 8.0 MiB" in status.message
    assert "held by `snapshot` 2.8 MiB" in status.message
    assert sorted(path.name for path in trained.checkpoints_dir.iterdir()) == before
    trained.profile.write_text(stored)
    rewrite(trained, "memory.residency=resident", f"runtime.max_steps={STEPS + 1}")
    assert len(go_on(trained.root)) == STEPS + 1
    assert set(memory_rows(trained)[-1]["regions"]) >= {"snapshot", "rollout_kv", "reference_weights", "gradients"}


def test_a_host_budget_too_small_ends_with_3(tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    host = "memory.host_budget_gib=0.001"
    done = rollplex("train", "--profile", "tiny", "--run-dir", run, "--plain", *sets(small(host)))
    assert done.returncode == 3
    assert "host memory" in done.stderr and "available" in done.stderr


def test_use_outside_of_a_lifetime_is_refused_or_named(prepared: RunFolder, tmp_path: Path) -> None:
    run = prepare_run(tmp_path / "run", prepared)
    done = warm.run([[Path(__file__).with_name("use_after_unmap.py"), run.root]])[0]
    ended = "whose lifetime ended after `update` (step 1, phase UPDATE)"
    assert f"REFUSED `actor_suffix[0]` asked for `gradients` (step 1, phase PUBLISH), {ended}" in done.stdout
    assert done.returncode == -signal.SIGSEGV
    assert "SURVIVED" not in done.stdout
    assert "is in region `gradients`, unmapped after `update` (step 1, phase UPDATE)" in done.stderr


def test_rows_of_other_ranks_go_after_decode_and_come_back_right(prepared: RunFolder, tmp_path: Path) -> None:
    """Train TP 2 over rollout TP 1: each rank holds all weights for decode and needs half of most to train. Every
    publish compares all weights of all ranks, byte by byte."""
    run = RunFolder(tmp_path / "run")
    keys = ("topology.ranks_per_node=2", "topology.train_tp=2", "guards.check_publish=true", "runtime.max_steps=2")
    base = ("model.init=checkpoint", f"model.config={prepared.base_dir}")
    train(run.root, *base, *keys)
    for rank in (0, 1):
        moves = [row for row in read_events(run.events(rank)) if row["name"] == "residency"]
        rows = [row for row in moves if row["regions"] == ["snapshot (holes)"]]
        assert [(row["step"], row["mapped"]) for row in rows] == [(1, False), (1, True), (2, False), (2, True)]
        whole = next(row["num_bytes"] for row in moves if row["regions"] == ["snapshot"])
        assert whole / 4 < rows[0]["num_bytes"] < whole / 2
