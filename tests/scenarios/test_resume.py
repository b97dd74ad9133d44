"""Killed with -9 and stopped by a signal, resumed each time, a run ends bit-equal to one that nothing disturbed."""

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
from scenarios.support import ALONE, ALONE_STEPS, rollplex, sets, small

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.status import read_status

if TYPE_CHECKING:
    from pathlib import Path

EXACT = ("step", "loss", "kl", "grad_norm", "reward_mean", "reward_std", "entropy", "logprob_diff_mean")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(400)]


def rows(run: RunFolder) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return [{key: row[key] for key in EXACT} for row in found]


def start(run: RunFolder, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rollplex_cli.cli.main", "train", "--run-dir", str(run.root), "--plain", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip


def steps_done(run: RunFolder) -> int:
    return len(run.metrics.read_text().splitlines()) if run.metrics.exists() else 0


def wait_for_step(run: RunFolder, process: subprocess.Popen[str], step: int) -> None:
    deadline = time.monotonic() + 120
    while steps_done(run) < step:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[0][-2000:]
        time.sleep(0.02)


def test_interrupted_twice_and_resumed(prepared: RunFolder, alone: RunFolder, tmp_path: Path) -> None:
    moment = random.Random(1)
    run = RunFolder(tmp_path / "run")
    overrides = small("model.init=checkpoint", f"model.config={prepared.base_dir}", *ALONE)
    process = start(run, "--profile", "tiny", *sets(overrides))
    wait_for_step(run, process, moment.randint(5, 9))
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

    process = start(run, "--resume")
    wait_for_step(run, process, 13)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == 75
    assert "--resume" in output

    done = rollplex("train", "--resume", "--run-dir", str(run.root), "--plain")
    assert done.returncode == 0, done.stderr[-2000:]
    assert rows(run) == rows(alone)
    assert run.evaluations.read_text() == alone.evaluations.read_text()
    responses = [json.loads(line) for line in (run.rollouts_dir / "rank0.jsonl").read_text().splitlines()]
    assert len(responses) == ALONE_STEPS * 4 * 4
