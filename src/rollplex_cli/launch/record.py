"""What the supervisor of a run says about it in `status/launch.json`: who runs it, where, and how it ended."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from rollplex_cli.core.errors import RollplexError
from rollplex_cli.core.files import read_json, read_jsonl, write_atomic

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder

Stage = Literal["prepare", "workers", "ended"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """One start of a run."""

    stage: Stage = "prepare"
    pid: int = field(default_factory=os.getpid)
    """Process id of the supervisor (of node 0)."""
    host: str = field(default_factory=socket.gethostname)
    started: float = field(default_factory=time.time)
    """Seconds since the epoch, as all times here."""
    ended: float | None = None
    job_id: str | None = None
    """The scheduler's; None for a run started by hand."""
    restart: int = 0
    """How often the scheduler has started the job before."""
    num_nodes: int = 1
    endpoint: str = ""
    """`host:port` where the nodes meet, once it is known."""
    first_step: int = 0
    """Steps done when this start began."""
    exit_code: int | None = None
    """What the run ended with; None while it runs."""
    error: str = ""
    """Class name of the error it ended with."""
    message: str = ""
    hint: str | None = None
    warnings: list[str] = field(default_factory=list)


def new_record(run: RunFolder, **fields: Any) -> LaunchRecord:
    """The record of a start that begins now."""
    return LaunchRecord(first_step=steps_done(run), **fields)


def ended_record(record: LaunchRecord, error: BaseException | None) -> LaunchRecord:
    """The record of a start that is over; no error is success."""
    if error is None:
        return dataclasses.replace(record, stage="ended", ended=time.time(), exit_code=0)
    ours = isinstance(error, RollplexError)
    return dataclasses.replace(
        record,
        stage="ended",
        ended=time.time(),
        exit_code=error.exit_code if isinstance(error, RollplexError) else 1,
        error=type(error).__name__,
        message=str(error) if ours else f"{type(error).__name__}: {error}",
        hint=error.hint if isinstance(error, RollplexError) else None,
    )


def write_record(run: RunFolder, record: LaunchRecord) -> None:
    """Replace the run's record."""
    run.status_dir.mkdir(parents=True, exist_ok=True)
    write_atomic(run.launch_status, json.dumps(dataclasses.asdict(record)) + "\n")


def read_record(run: RunFolder) -> LaunchRecord | None:
    """The run's record; None where it was never started."""
    row = read_json(run.launch_status)
    if row is None or row.get("stage") not in get_args(Stage):
        return None
    names = {item.name for item in dataclasses.fields(LaunchRecord)}
    return LaunchRecord(**{key: value for key, value in row.items() if key in names})


def steps_done(run: RunFolder) -> int:
    """Number of the last step in the run's metrics."""
    return max((int(row["step"]) for row in read_jsonl(run.metrics) if "step" in row), default=0)
