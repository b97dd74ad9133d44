"""What the scheduler says, in its own words, with and without an accounting database."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex_cli.launch.slurm.environment import port_of_job, read_environment
from rollplex_cli.launch.slurm.scheduler import JobState, job_state, parse_sacct, parse_scontrol, script_of_job

PENDING = (
    "JobId=17 JobName=tiny UserId=u(1) Priority=1 JobState=PENDING Reason=Resources Dependency=(null) Requeue=1 "
    "Restarts=2 ExitCode=0:0 StartTime=2026-01-02T03:04:05 NodeList=(null) Command=/r/submitit/x.sh WorkDir=/w\n"
)
ARRAY = (
    "JobId=21 ArrayJobId=20 ArrayTaskId=1 JobName=x JobState=TIMEOUT Reason=TimeLimit Restarts=0 ExitCode=0:15 "
    "NodeList=n1\n"
    "JobId=20 ArrayJobId=20 ArrayTaskId=2-9%4 JobName=x JobState=PENDING Reason=Priority Restarts=0 ExitCode=0:0\n"
)


def fake(folder: Path, **programs: str) -> None:
    """Programs of Slurm that print a text; one that is not named is not there."""
    for name, text in programs.items():
        (folder / f"{name}.txt").write_text(text)
        (folder / name).write_text(f"#!/bin/sh\ncat '{folder}/{name}.txt'\n")
        (folder / name).chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("scontrol", "sacct"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def test_a_waiting_job_says_why() -> None:
    job = parse_scontrol(PENDING, "17")
    assert job is not None
    assert (job.state, job.is_waiting, job.restarts, job.nodes) == ("PENDING", True, 2, "")
    assert job.reason_text == "Resources: no nodes are free"
    assert parse_scontrol(PENDING, "18") is None


def test_a_task_of_an_array_is_found_by_its_number() -> None:
    job = parse_scontrol(ARRAY, "20_1")
    assert job is not None
    assert (job.state, job.signal, job.nodes) == ("TIMEOUT", 15, "n1")


def test_the_last_start_of_a_requeued_job_counts() -> None:
    text = "17|PREEMPTED|0:0|n1|0|2026\n17|CANCELLED by 1000|0:15|n2|1|2026\n"
    job = parse_sacct(text, "17")
    assert job is not None
    assert (job.state, job.signal, job.restarts, job.source) == ("CANCELLED", 15, 1, "sacct")
    assert parse_sacct("", "17") is None


def test_the_database_tells_the_end_and_the_controller_the_present(programs: Path) -> None:
    ended = PENDING.replace("JobState=PENDING", "JobState=COMPLETED")
    fake(programs, scontrol=ended)
    assert job_state("17") == parse_scontrol(ended, "17")
    fake(programs, sacct="17|TIMEOUT|0:0|n1|2|2026\n")
    assert (job_state("17") or JobState(job_id="", state="")).state == "TIMEOUT"
    fake(programs, scontrol=PENDING)
    assert (job_state("17") or JobState(job_id="", state="")).state == "PENDING"


def test_nobody_knows_the_job(programs: Path) -> None:
    assert job_state("17") is None
    assert script_of_job("17") is None
    fake(programs, scontrol=PENDING)
    assert script_of_job("17") == Path("/r/submitit/x.sh")


def test_environment_of_a_task() -> None:
    env = {"SLURM_JOB_ID": "31", "SLURM_NODEID": "2", "SLURM_JOB_NUM_NODES": "4", "SLURM_RESTART_COUNT": "1"}
    task = read_environment(env)
    assert (task.job_id, task.node, task.num_nodes, task.restart, task.start_id) == ("31", 2, 4, 1, "31.1")
    assert read_environment(env | {"SLURM_ARRAY_JOB_ID": "30", "SLURM_ARRAY_TASK_ID": "7"}).job_id == "30_7"
    with pytest.raises(Exception, match="not a task of a Slurm job"):
        read_environment({})
    ports = {port_of_job(job) for job in ("1", "2", "30_1", "30_2", "999999_3")}
    assert len(ports) == 5
    assert all(1024 < port < 32768 for port in ports)
