"""Stopping a run: at the end of its step with a checkpoint, or at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import ClusterError, UsageError
from rollplex_cli.core.files import write_atomic
from rollplex_cli.launch.follow.status import GOING_ON, run_status
from rollplex_cli.launch.record import read_record
from rollplex_cli.launch.slurm.scheduler import job_state
from rollplex_cli.launch.subprocess import run_text, send_signal

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder


def cancel_run(run: RunFolder, *, now: bool) -> str:
    """Ask a run to end; returns what was done, in words.

    Args:
        now: do not wait for the end of the step; the last checkpoint stays.

    Raises:
        UsageError: it does not run, or runs on another machine.
        ClusterError: the scheduler refused.
    """
    status = run_status(run)
    if status.state not in GOING_ON:
        raise UsageError(f"the run is not going on, it is {status.state}: `{run.root}`")
    # Before the signal: what ends because of it must not be queued again.
    run.status_dir.mkdir(parents=True, exist_ok=True)
    write_atomic(run.cancelled, json.dumps({"time": time.time(), "now": now}) + "\n")
    if status.job_id is not None:
        return _cancel_job(status.job_id, now=now)
    return _cancel_local(run, now=now)


def _cancel_job(job_id: str, *, now: bool) -> str:
    job = job_state(job_id)
    if job is None:
        raise ClusterError(f"the scheduler does not know the job: {job_id}")
    graceful = job.state == "RUNNING" and not now
    # Without a batch flag a signal goes to the tasks, not to the job's script.
    argv = ["scancel", *(["--signal=TERM"] if graceful else []), job_id]
    if run_text(argv) is None:
        raise ClusterError(f"`{' '.join(argv)}` failed")
    if graceful:
        return f"job {job_id} stops after its step and writes a checkpoint"
    return f"job {job_id} is cancelled"


def _cancel_local(run: RunFolder, *, now: bool) -> str:
    record = read_record(run)
    if record is None:
        raise UsageError(f"the run has not started yet: `{run.root}`")
    if record.host != socket.gethostname():
        raise UsageError(f"the run's process {record.pid} is on another machine: {record.host}")
    if record.pid == os.getpid():
        raise UsageError("a run cannot cancel itself")
    send_signal([record.pid], signal.SIGTERM)
    if now:
        # The second request, and only Ctrl-C makes one, ends the workers without asking.
        time.sleep(0.5)
        send_signal([record.pid], signal.SIGINT)
        return f"process {record.pid} ends its workers at once"
    return f"process {record.pid} stops after its step and writes a checkpoint"
