"""Is a job queued again?"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from rollplex_cli.core import errors
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.launch.record import LaunchRecord, ended_record, new_record, write_record
from rollplex_cli.launch.slurm.finish import decide, main

START = LaunchRecord(job_id="7", restart=1, first_step=10)
STOPPED = errors.InterruptedRunError("stopped after step 12")
LOST = errors.RankLostError("rank 1 was killed by signal 9")


@pytest.mark.parametrize(
    ("error", "restarts", "steps", "cancelled", "again"),
    [
        (None, 1, 20, False, False),
        (STOPPED, 1, 12, False, True),
        (STOPPED, 1, 10, False, True),  # stopped before its first step, as a preemption right after the start does
        (STOPPED, 3, 12, False, False),
        (STOPPED, 1, 12, True, False),
        (LOST, 1, 12, False, True),
        (LOST, 1, 10, False, False),  # twice without a step between
        (LOST, 0, 10, False, True),
        (LOST, 3, 12, False, False),
        (errors.RewardError("raised"), 0, 12, False, False),
        (errors.TargetNotReachedError("0.3"), 0, 12, False, False),
        (errors.DataError("bad"), 0, 0, False, False),
        (errors.ClusterError("port"), 0, 0, False, False),
    ],
)
def test_decisions(error: errors.RollplexError | None, restarts: int, steps: int, cancelled: bool, again: bool) -> None:
    record = ended_record(dataclasses.replace(START, restart=restarts), error)
    decision = decide(record, restarts=restarts, max_requeues=3, cancelled=cancelled, steps=steps)
    assert decision.requeue is again, decision.reason


def test_a_supervisor_that_was_killed_is_a_lost_process() -> None:
    killed = dataclasses.replace(START, stage="workers")
    assert decide(killed, restarts=1, max_requeues=3, cancelled=False, steps=12).requeue
    assert not decide(killed, restarts=1, max_requeues=3, cancelled=False, steps=10).requeue
    assert decide(None, restarts=0, max_requeues=3, cancelled=False, steps=0).requeue


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    run = RunFolder(tmp_path)
    run.make()
    return run


def test_the_script_gets_a_word_and_the_run_s_exit_code(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    write_record(run, ended_record(new_record(run, job_id="7", restart=1), STOPPED))
    assert main([str(run.root), "1", "3"]) == 75
    assert capsys.readouterr() == ("requeue\n", "job 7: interrupted; queued again, time 2 of at most 3\n")
    run.cancelled.write_text(json.dumps({}))
    assert main([str(run.root), "1", "3"]) == 75
    assert capsys.readouterr().out == "end\n"


def test_a_record_of_an_earlier_start_does_not_speak_for_this_one(run: RunFolder) -> None:
    write_record(run, ended_record(new_record(run, job_id="7", restart=0), None))
    assert main([str(run.root), "137", "3"]) == 137
    write_record(run, ended_record(new_record(run, job_id="6", restart=1), None))
    assert main([str(run.root), "0", "3"]) == 1  # the tasks say all is well, nobody says it for the run
