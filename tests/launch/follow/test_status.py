"""One word for the state of a run, from everything that may be said about it."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest

from rollplex_cli.core import errors
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.status import RankStatus, write_status
from rollplex_cli.launch.follow.cancel import cancel_run
from rollplex_cli.launch.follow.logs import follow_logs, log_files, show_logs
from rollplex_cli.launch.follow.status import run_status, state_of
from rollplex_cli.launch.record import LaunchRecord, ended_record, write_record
from rollplex_cli.launch.registry import find_runs, remember
from rollplex_cli.launch.run_folder import create_run, lock_run
from rollplex_cli.launch.slurm.scheduler import JobState

RECORD = LaunchRecord(stage="workers", job_id="7", restart=1, host="n1")
DONE = ended_record(RECORD, None)
STOPPED = ended_record(RECORD, errors.InterruptedRunError("stopped after step 3"))
FAILED = ended_record(RECORD, errors.RewardError("the reward raised"))


def job(state: str, **fields: object) -> JobState:
    return JobState(job_id="7", state=state, **{"restarts": 1, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("record", "scheduler", "cancelled", "word", "detail"),
    [
        (None, job("PENDING", reason="Resources", restarts=0), False, "queued", "Resources: no nodes are free"),
        (STOPPED, job("PENDING", reason="BeginTime"), False, "queued", "queued again for the first time"),
        (None, job("RUNNING", nodes="n[1-2]"), False, "starting", "on n[1-2]"),
        (dataclasses.replace(RECORD, restart=0), job("RUNNING"), False, "starting", ""),
        (dataclasses.replace(RECORD, stage="prepare"), job("RUNNING"), False, "preparing", ""),
        (RECORD, job("RUNNING"), False, "running", ""),
        (DONE, job("COMPLETED"), False, "done", ""),
        (DONE, job("FAILED"), False, "failed", "the scheduler says FAILED"),
        (RECORD, job("COMPLETED"), False, "failed", "the run left no reason"),
        (DONE, job("TIMEOUT"), False, "timeout", "ended at its time limit"),
        (RECORD, job("TIMEOUT"), False, "timeout", "ended at its time limit"),
        (STOPPED, job("FAILED"), False, "interrupted", "stopped after step 3"),
        (STOPPED, job("FAILED"), True, "cancelled", "stopped after step 3"),
        (FAILED, job("FAILED"), False, "failed", "the reward raised"),
        (RECORD, job("NODE_FAIL"), False, "node failed", ""),
        (RECORD, job("CANCELLED"), True, "cancelled", ""),
        (RECORD, job("OUT_OF_MEMORY"), False, "out of memory", ""),
        (DONE, None, False, "done", "the scheduler does not know the job any more"),
        (RECORD, None, False, "lost", "the scheduler does not know job 7"),
    ],
)
def test_submitted_runs(
    record: LaunchRecord | None, scheduler: JobState | None, cancelled: bool, word: str, detail: str
) -> None:
    found, why = state_of(record, "7", scheduler, alive=None, cancelled=cancelled)
    assert found == word
    assert detail in why


@pytest.mark.parametrize(
    ("record", "alive", "word"),
    [
        (None, False, "not started"),
        (None, True, "starting"),
        (dataclasses.replace(RECORD, stage="prepare"), True, "preparing"),
        (RECORD, True, "running"),
        (RECORD, None, "running"),
        (RECORD, False, "lost"),
        (DONE, False, "done"),
        (FAILED, False, "failed"),
        (ended_record(RECORD, errors.TargetNotReachedError("0.3")), False, "target not reached"),
        (ended_record(RECORD, KeyError("x")), False, "failed"),
    ],
)
def test_local_runs(record: LaunchRecord | None, alive: bool | None, word: str) -> None:
    assert state_of(record, None, None, alive=alive, cancelled=False)[0] == word


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = create_run(tmp_path / "my run", profile_yaml="name: x\n", plan_json='{"max_steps": 20}', argv=["rollplex"])
    run.metrics.write_text(
        "".join(json.dumps({"step": n, "step_s": 2.0, "reward_mean": n / 10}) + "\n" for n in (1, 2, 3))
    )
    write_record(run, LaunchRecord(stage="workers", warnings=["the lead is short"]))
    write_status(run.status(0), RankStatus(rank=0, state="running", step=4, waiting=["host lane: `reward[1]`"]))
    return run


def test_everything_about_a_running_run(run: RunFolder) -> None:
    lock = lock_run(run)
    try:
        found = run_status(run)
    finally:
        lock.release()
    assert (found.state, found.step, found.max_steps, found.eta_s, found.reward_mean) == ("running", 3, 20, 34.0, 0.3)
    assert found.waiting == ["rank 0: host lane: `reward[1]`"]
    assert found.warnings == ["the lead is short"]
    assert run_status(run).state == "lost"


def test_runs_are_found_from_anywhere(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", "")
    remember(run, "17")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert find_runs("my run") == find_runs("17") == find_runs(str(run.root)) == [run]
    with pytest.raises(errors.UsageError, match="no such run or job: `18`") as caught:
        find_runs("18")
    assert caught.value.hint == f"the latest run is `{run.root}`"
    with pytest.raises(errors.UsageError, match="not a run folder"):
        find_runs(".")


def test_an_array_is_all_of_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", "")
    runs = [
        create_run(tmp_path / "sweep" / str(n), profile_yaml="name: x\n", plan_json="{}", argv=["x"]) for n in range(3)
    ]
    RunFolder(tmp_path / "sweep").job.write_text('{"num_runs": 3, "job_id": "40"}')
    for index, one in enumerate(runs):
        remember(one, f"40_{index}")
    assert find_runs("40") == find_runs("sweep") == find_runs(str(tmp_path / "sweep")) == runs
    assert find_runs("40_2") == [runs[2]]


def test_logs_of_one_rank_or_of_all(run: RunFolder) -> None:
    run.rank_log(0).write_text("one\ntwo\nthree\n")
    run.rank_log(11).write_text("other\n")
    run.launcher_log.write_text("launcher\n")
    lines: list[str] = []
    show_logs(run, lines.append, rank=0, num_lines=2)
    assert lines == ["two", "three"]
    lines.clear()
    show_logs(run, lines.append, rank=None, num_lines=1)
    assert lines == ["[torchrun] launcher", "[rank 0] three", "[rank 11] other"]
    with pytest.raises(errors.UsageError, match="no log of rank: 3"):
        log_files(run, 3)


def test_following_ends_with_the_run_and_loses_nothing(run: RunFolder) -> None:
    run.rank_log(0).write_text("one\ntwo\n")
    lock, lines = lock_run(run), []

    def write(line: str) -> None:
        lines.append(line)
        if line == "two":
            with run.rank_log(0).open("a") as stream:
                stream.write("three\nfour\n")
            write_record(run, DONE)
            lock.release()

    started = time.monotonic()
    follow_logs(run, write, rank=0, num_lines=1)
    assert lines == ["two", "three", "four"]
    assert time.monotonic() - started < 10


def test_only_a_run_that_goes_on_is_cancelled(run: RunFolder) -> None:
    with pytest.raises(errors.UsageError, match="the run is not going on, it is lost"):
        cancel_run(run, now=False)
    assert not run.cancelled.exists()
    lock = lock_run(run)
    try:
        write_record(run, LaunchRecord(stage="workers", pid=os.getpid()))
        with pytest.raises(errors.UsageError, match="cannot cancel itself"):
            cancel_run(run, now=False)
    finally:
        lock.release()
