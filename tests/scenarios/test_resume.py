"""Kill -9 at any moment, resume, and end bit-equal to a run that nothing disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from scenarios.support import rollplex, sets, small

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.status import read_status

if TYPE_CHECKING:
    from pathlib import Path

STEPS = 12
EXACT = ("step", "loss", "kl", "grad_norm", "reward_mean", "reward_std", "entropy", "logprob_diff_mean")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(400)]


def arguments(run: RunFolder, prepared: RunFolder) -> list[str]:
    base = ("model.init=checkpoint", f"model.config={prepared.base_dir}")
    overrides = small("runtime.checkpoint_every=3", f"runtime.max_steps={STEPS}", *base)
    return ["train", "--profile", "tiny", "--run-dir", str(run.root), "--plain", *sets(overrides)]


def rows(run: RunFolder) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [{key: row[key] for key in EXACT} for row in found]


@pytest.fixture(scope="module")
def undisturbed(prepared: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    run = RunFolder(tmp_path_factory.mktemp("undisturbed") / "run")
    done = rollplex(*arguments(run, prepared))
    assert done.returncode == 0, done.stderr[-2000:]
    return rows(run)


def start(run: RunFolder, prepared: RunFolder) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rollplex_cli.cli.main", *arguments(run, prepared)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip


def steps_done(run: RunFolder) -> int:
    return len(run.metrics.read_text().splitlines()) if run.metrics.exists() else 0


def wait_for_step(run: RunFolder, process: subprocess.Popen[str], step: int) -> None:
    deadline = time.monotonic() + 120
    while steps_done(run) < step:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0][-2000:]
        time.sleep(0.02)


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_with_9_and_resumed(
    prepared: RunFolder, undisturbed: list[dict[str, Any]], tmp_path: Path, seed: int
) -> None:
    moment = random.Random(seed)
    run = RunFolder(tmp_path / "run")
    process = start(run, prepared)
    wait_for_step(run, process, moment.randint(4, 9))
    time.sleep(moment.random() * 0.3)
    status = read_status(run.status(0))
    assert status is not None and status.pid is not None
    os.kill(status.pid, signal.SIGKILL)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 1
    assert "rank 0" in output and "Traceback" not in output
    # A kill in the middle of writing leaves half a line; the resumed run must not stumble over it.
    with run.metrics.open("a") as stream:
        stream.write('{"step": 99, "lo')
    done = rollplex("train", "--resume", "--run-dir", str(run.root), "--plain")
    assert done.returncode == 0, done.stderr[-2000:]
    assert rows(run) == undisturbed


def test_stopped_by_a_signal_and_resumed(
    prepared: RunFolder, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    process = start(run, prepared)
    wait_for_step(run, process, 5)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 75
    assert "--resume" in output
    done = rollplex("train", "--resume", "--run-dir", str(run.root), "--plain")
    assert done.returncode == 0, done.stderr[-2000:]
    assert rows(run) == undisturbed
    responses = [json.loads(line) for line in (run.rollouts_dir / "rank0.jsonl").read_text().splitlines()]
    assert len(responses) == STEPS * 4 * 4
