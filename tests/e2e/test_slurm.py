"""The real command line under a real Slurm (`make test-slurm`): two nodes, one rank each, gloo between them.

One run is left alone. A second one is preempted, requeued by hand, loses a rank to SIGKILL and reaches its time limit,
one after the other, and must end with the very same numbers.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from scenarios.support import rollplex, sets, small

from rollplex_cli.core.files import read_json, read_jsonl
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.launch.record import read_record
from rollplex_cli.launch.slurm.scheduler import job_state

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

STEPS = 16
TIMED = ("step_s", "phase_s", "data_wait_s", "data_wait_share")
"""Columns of the metrics that are times."""
JOB = small(
    "topology.num_nodes=2",
    f"runtime.max_steps={STEPS}",
    "runtime.checkpoint_every=2",
    "runtime.keep_checkpoints=3",
    "runtime.stall_timeout_s=60",
)


@dataclasses.dataclass(frozen=True)
class Job:
    """A submitted job."""

    job_id: str
    run: RunFolder

    def state(self) -> str:
        found = job_state(self.job_id)
        return found.state if found is not None else ""

    def steps(self) -> int:
        return max((row["step"] for row in read_jsonl(self.run.metrics)), default=0)

    def restart(self) -> int:
        record = read_record(self.run)
        return record.restart if record is not None else -1

    def wait(self, condition: Callable[[], bool], what: str, limit_s: float = 120.0) -> None:
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f"waited for {what}, is {self.state()}\n{self.log()}"
            time.sleep(0.1)

    def wait_for_step(self, restart: int, step: int) -> None:
        """This start has come so far."""
        self.wait(lambda: self.restart() == restart and self.steps() >= step, f"step {step} of start {restart}")

    def log(self) -> str:
        return self.run.job_log.read_text() if self.run.job_log.exists() else ""


def submit(root: Path, overrides: list[str], *more: str, mode: str = "", cwd: Path | None = None) -> Job:
    done = rollplex(
        "submit", "--slurm", "--profile", "tiny", "--site", "local", *sets(overrides), "--run-dir", str(root),
        "--env", f"ROLLPLEX_TEST_REWARD={mode}", "--no-data", "--json", *more, cwd=cwd,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    return Job(said["job_id"], RunFolder(root))


def slurm(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30).stdout


def results(run: RunFolder) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMED} for row in read_jsonl(run.metrics)]


def status(job: Job, cwd: Path, env: dict[str, str] | None = None) -> dict[str, Any]:
    done = rollplex("status", job.job_id, "--json", cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run that nobody bothers; it runs while the tests before the comparison do."""
    root = tmp_path_factory.mktemp("undisturbed") / "a run's folder"
    return submit(root, JOB, "--sbatch", "comment=it's two words")


def test_submitted_run_completes(undisturbed: Job, tmp_path: Path) -> None:
    job = undisturbed
    seen: set[str] = set()

    def over() -> bool:
        seen.add(job.state())
        return job.state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")

    job.wait(over, "the end")
    assert job.state() == "COMPLETED", job.log()
    assert "RUNNING" in seen
    assert len(results(job.run)) == STEPS
    found = status(job, tmp_path)
    assert (found["state"], found["step"], found["exit_code"], found["run"]) == ("done", STEPS, 0, str(job.run.root))
    # Without the list of the user's runs the scheduler leads to the folder.
    assert status(job, tmp_path, {"XDG_STATE_HOME": str(tmp_path)}) == found
    done = rollplex("logs", "-f", job.job_id, cwd=tmp_path)
    assert done.returncode == 0
    assert re.search(r"^\[job\] start \d+\.0 of ", done.stdout, re.MULTILINE)
    assert {line.split("]")[0] for line in done.stdout.splitlines()} >= {"[job", "[rank 0", "[rank 1"}
    done = rollplex("logs", job.job_id, "--rank", "1", "--lines", "1", cwd=tmp_path)
    assert re.search(rf"step {STEPS}: reward 0\.\d+, loss .* s$", done.stdout)
    assert "every rank is done" in job.log()
    assert "Comment=it's two words" in slurm("scontrol", "show", "job", job.job_id)


def test_whatever_interrupts_a_run_it_ends_with_the_same_numbers(undisturbed: Job, tmp_path: Path) -> None:
    pace = tmp_path / "pace"
    pace.write_text("0.1")
    job = submit(tmp_path / "run", JOB, "--max-requeues", "4", "--stop-lead", "20", mode=f"pace:{pace}")

    # A job of a higher partition wants both nodes.
    job.wait_for_step(0, 3)
    slurm("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1")
    job.wait(lambda: job.restart() == 1, "the start after the preemption")
    assert "interrupted; queued again, time 1 of at most 4" in job.log()

    # Somebody requeues it by hand.
    job.wait_for_step(1, job.steps() + 1)
    slurm("scontrol", "requeue", job.job_id)
    job.wait(lambda: job.restart() == 2, "the start after the requeue")

    # One rank is killed.
    job.wait_for_step(2, job.steps() + 1)
    record = read_record(job.run)
    assert record is not None
    os.kill((read_json(job.run.status(1)) or {})["pid"], signal.SIGKILL)
    job.wait(lambda: (found := read_record(job.run)) is not None and found.stage == "ended", "its end")
    ended = read_record(job.run)
    assert ended is not None
    assert ended.error == "RankLostError"
    assert ended.message.startswith("rank 1 was killed by signal 9")
    waits = [line for line in ended.message.splitlines() if line.startswith("  rank 0, step ")]
    assert len(waits) == 1
    assert re.search(r"phase [A-Z]+: .*(lane: `|waits for|rank 1 to arrive)", waits[0])
    job.wait(lambda: job.restart() == 3, "the start after the loss of a rank")

    # Its time is up. Slurm looks every half minute only, the run must not be done by then.
    pace.write_text("0.5")
    slurm("scontrol", "update", f"jobid={job.job_id}", "timelimit=1")
    job.wait(lambda: job.state() == "PENDING", "the time limit")
    slurm("scontrol", "update", f"jobid={job.job_id}", "timelimit=30")
    pace.write_text("0")
    job.wait(lambda: job.restart() == 4, "the start after the time limit")

    job.wait(lambda: job.state() in ("COMPLETED", "FAILED", "TIMEOUT"), "the end")
    assert job.state() == "COMPLETED", job.log()
    assert results(job.run) == results(undisturbed.run)
    assert status(job, tmp_path)["restarts"] == 4
