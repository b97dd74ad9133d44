"""The state of a run, from its own files and from what the scheduler says."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.files import read_json, read_jsonl
from rollplex_cli.core.status import ALIVE, read_prepare_status, read_status
from rollplex_cli.launch.record import LaunchRecord, read_record
from rollplex_cli.launch.run_folder import lock_run
from rollplex_cli.launch.slurm.scheduler import JobState, job_state

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder
    from rollplex_cli.core.status import RankStatus

Word = Literal[
    "not started", "queued", "starting", "preparing", "running", "ending", "done", "target not reached", "failed",
    "interrupted", "cancelled", "timeout", "node failed", "out of memory", "lost", "unknown",
]  # fmt: skip
GOING_ON = ("queued", "starting", "preparing", "running", "ending")
"""States that another one follows."""
ETA_STEPS = 10
TERMINAL: dict[str, Word] = {
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "CANCELLED": "cancelled",
    "NODE_FAIL": "node failed",
    "BOOT_FAIL": "node failed",
    "OUT_OF_MEMORY": "out of memory",
    "PREEMPTED": "interrupted",
}
"""What the scheduler's last word means, whatever the run itself said before."""
BY_EXIT_CODE: dict[int, Word] = {0: "done", 5: "target not reached", 75: "interrupted"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """What `rollplex status` shows."""

    run: str
    state: Word
    detail: str = ""
    """Why, in words."""
    job_id: str | None = None
    scheduler_state: str | None = None
    restarts: int = 0
    step: int = 0
    max_steps: int | None = None
    eta_s: float | None = None
    """At most so long, at the pace of the last steps; a target may end the run earlier."""
    reward_mean: float | None = None
    exit_code: int | None = None
    error: str = ""
    """The last error, of the current start or the one before."""
    hint: str | None = None
    waiting: list[str] = field(default_factory=list)
    """What each rank waits for, one line per rank."""
    warnings: list[str] = field(default_factory=list)


def run_status(run: RunFolder) -> RunStatus:
    """Ask everybody who knows."""
    record = read_record(run)
    job_id = (read_json(run.job) or {}).get("job_id")
    job = job_state(job_id) if job_id is not None else None
    alive = _is_alive(run, record) if job_id is None else None
    ranks = _ranks(run)
    word, detail = state_of(record, job_id, job, alive=alive, cancelled=run.cancelled.exists(), prepare=_prepare(run))
    rows = [row for row in read_jsonl(run.metrics) if "step" in row]
    step, most = (int(rows[-1]["step"]) if rows else 0), _max_steps(run)
    return RunStatus(
        run=str(run.root),
        state=word,
        detail=detail,
        job_id=job_id,
        scheduler_state=job.state if job is not None else None,
        restarts=max(job.restarts if job is not None else 0, record.restart if record is not None else 0),
        step=step,
        max_steps=most,
        eta_s=_eta(rows, step, most) if word == "running" else None,
        reward_mean=rows[-1].get("reward_mean") if rows else None,
        exit_code=record.exit_code if record is not None and word not in GOING_ON else None,
        error=record.message if record is not None else "",
        hint=record.hint if record is not None else None,
        waiting=[f"rank {s.rank}: {'; '.join(s.waiting)}" for s in ranks if s.waiting and s.state in ALIVE],
        warnings=list(record.warnings) if record is not None else [],
    )


def state_of(
    record: LaunchRecord | None,
    job_id: str | None,
    job: JobState | None,
    *,
    alive: bool | None,
    cancelled: bool,
    prepare: str = "",
) -> tuple[Word, str]:
    """One word for the state of a run, and why. Pure.

    Args:
        record: what the supervisor said last.
        job_id: of a submitted run.
        job: what the scheduler says of it; None if it does not know it.
        alive: whether a supervisor on this machine holds the run; None if that cannot be told.
        cancelled: the user asked for the end.
        prepare: what the preparation does.
    """
    if job_id is None:
        return _local(record, alive=alive, cancelled=cancelled, prepare=prepare)
    if job is None:
        if record is not None and record.stage == "ended":
            word, detail = _own_word(record, cancelled=cancelled)
            return word, detail or "by the run's own word; the scheduler does not know the job any more"
        return "lost", f"the scheduler does not know job {job_id}, and the run left no reason"
    if job.is_waiting:
        again = f", queued again for the {_ordinal(job.restarts)} time" if job.restarts else ""
        return "queued", f"{job.reason_text or 'waiting'}{again}"
    if job.is_active:
        return _active(record, job, prepare)
    return _ended(record, job, cancelled=cancelled)


def _local(record: LaunchRecord | None, *, alive: bool | None, cancelled: bool, prepare: str) -> tuple[Word, str]:
    if record is None:
        return ("starting", "") if alive else ("not started", "")
    if record.stage == "ended" and not alive:
        return _own_word(record, cancelled=cancelled)
    if alive is False:
        return "lost", f"its process {record.pid} on {record.host} is gone and left no reason"
    where = "" if alive else f"on {record.host}, by its own word"
    return ("preparing", prepare or where) if record.stage == "prepare" else ("running", where)


def _active(record: LaunchRecord | None, job: JobState, prepare: str) -> tuple[Word, str]:
    where = f"on {job.nodes}" if job.nodes else ""
    if record is None or record.job_id != job.job_id or record.restart != job.restarts:
        return "starting", where
    if record.stage == "ended" or job.state == "COMPLETING":
        return "ending", where
    return ("preparing", f"{prepare} {where}".strip()) if record.stage == "prepare" else ("running", where)


def _ended(record: LaunchRecord | None, job: JobState, *, cancelled: bool) -> tuple[Word, str]:
    said = f"the scheduler says {job.state}"
    if job.state in TERMINAL:
        word = TERMINAL[job.state]
        if word == "timeout":
            return word, f"{said}: it was ended at its time limit"
        return word, said
    if record is None or record.stage != "ended":
        return "failed", f"{said}, and the run left no reason"
    word, detail = _own_word(record, cancelled=cancelled)
    if (word == "done") != (job.state == "COMPLETED"):
        # Neither is believed alone: success needs both.
        return "failed", f"{said}, the run itself: {detail or word}"
    return word, detail


def _own_word(record: LaunchRecord, *, cancelled: bool) -> tuple[Word, str]:
    word = BY_EXIT_CODE.get(record.exit_code if record.exit_code is not None else 1, "failed")
    if cancelled and word == "interrupted":
        return "cancelled", record.message
    return word, record.message


def _is_alive(run: RunFolder, record: LaunchRecord | None) -> bool | None:
    if record is not None and record.host != socket.gethostname():
        return None
    try:
        lock_run(run).release()
    except UsageError:
        return True
    except OSError:
        return None
    return False


def _prepare(run: RunFolder) -> str:
    status = read_prepare_status(run.prepare_status)
    if status is None:
        return ""
    return f"{status.stage} {status.step}/{status.total}" if status.total else status.stage


def _ranks(run: RunFolder) -> list[RankStatus]:
    ranks: list[RankStatus] = []
    while (status := read_status(run.status(len(ranks)))) is not None:
        ranks.append(status)
    return ranks


def _max_steps(run: RunFolder) -> int | None:
    value = (read_json(run.plan) or {}).get("max_steps")
    return int(value) if value is not None else None


def _eta(rows: list[dict[str, Any]], step: int, most: int | None) -> float | None:
    times = [float(row["step_s"]) for row in rows[-ETA_STEPS:] if isinstance(row.get("step_s"), int | float)]
    return (most - step) * sum(times) / len(times) if times and most is not None else None


def _ordinal(number: int) -> str:
    words = {1: "first", 2: "second", 3: "third"}
    return words.get(number, f"{number}th")
