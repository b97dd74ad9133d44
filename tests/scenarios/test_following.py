"""A local run looked after from elsewhere, and ranks that hang or die: everything through the real command line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from scenarios.support import rollplex, sets, small

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.status import read_status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(200)]


class Background:
    """A run in a process of its own."""

    def __init__(self, root: Path, overrides: list[str], mode: str = "") -> None:
        self.run = RunFolder(root)
        arguments = ["train", "--profile", "tiny", "--run-dir", str(root), "--plain", *sets(small(*overrides))]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollplex_cli.cli.main", *arguments],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "NO_COLOR": "1", "ROLLPLEX_TEST_REWARD": mode},
        )  # fmt: skip

    def wait_for_step(self, step: int, limit_s: float = 120.0) -> None:
        end = time.monotonic() + limit_s
        while f'"step": {step},' not in (self.run.metrics.read_text() if self.run.metrics.exists() else ""):
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < end
            time.sleep(0.1)

    def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        _, err = self.process.communicate(timeout=100)
        return self.process.returncode, err


@pytest.fixture
def start(prepared: RunFolder, tmp_path: Path) -> Iterator[Callable[..., Background]]:
    """Starts the small job; whatever is left of it is ended."""
    started: list[Background] = []

    def begin(*more: str, mode: str = "") -> Background:
        base = ("model.init=checkpoint", f"model.config={prepared.base_dir}", "runtime.max_steps=500")
        started.append(Background(tmp_path / "a run", [*base, *more], mode))
        return started[-1]

    yield begin
    for job in started:
        job.process.kill()
        job.process.wait()


def test_a_local_run_is_seen_and_cancelled_from_elsewhere(start: Callable[..., Background], tmp_path: Path) -> None:
    job = start()
    job.wait_for_step(2)
    state = json.loads(rollplex("status", "a run", "--json", cwd=tmp_path.parent).stdout)
    assert state["state"] == "running"
    assert state["step"] >= 2
    assert state["eta_s"] > 0
    log = rollplex("logs", "--rank", "0", str(job.run.root), cwd=tmp_path.parent)
    assert re.search(r"step 2: reward 0\.\d+", log.stdout)
    done = rollplex("cancel", "a run", cwd=tmp_path.parent)
    assert done.returncode == 0, done.stderr
    assert "stops after its step and writes a checkpoint" in done.stderr
    assert job.end()[0] == 75
    state = json.loads(rollplex("status", str(job.run.root), "--json").stdout)
    assert (state["state"], state["exit_code"]) == ("cancelled", 75)
    assert re.search(r"stopped by a signal after step \d+, checkpoint written", state["detail"])
    assert rollplex("cancel", str(job.run.root)).returncode == 2


TWO_RANKS = ("topology.ranks_per_node=2", "runtime.stall_timeout_s=10")


def test_a_rank_that_hangs_is_named_with_what_the_others_waited_for(start: Callable[..., Background]) -> None:
    job = start(*TWO_RANKS)
    job.wait_for_step(2)
    status = read_status(job.run.status(1))
    assert status is not None
    assert status.pid is not None
    os.kill(status.pid, signal.SIGSTOP)
    stopped = time.time()
    code, err = job.end()
    assert code == 1
    named = read_status(job.run.status(0))
    assert named is not None
    # The time limit and the next look at the clock; the rest is the end of the processes.
    assert named.time - stopped < 10 + 10
    assert time.time() - stopped < 10 + 60
    assert re.search(r"error: rank 1 hangs: it has not moved for \d+ s, in step \d+, phase [A-Z]+", err), err
    assert re.search(r"^ +rank 0, step \d+, phase [A-Z]+: .*rank 1 to arrive there too", err, re.MULTILINE), err
    assert re.search(r"^ +rank 1, step \d+, phase [A-Z]+: .*`?\w+", err, re.MULTILINE), err
