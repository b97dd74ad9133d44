"""What a process says about itself: the only way exit codes and reasons leave a rank.

torchrun turns every worker's exit code into 1, so a rank writes its own here and the supervisor reads it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from rollplex_cli.core import errors
from rollplex_cli.core.files import read_json, write_atomic

if TYPE_CHECKING:
    from pathlib import Path

State = Literal["starting", "running", "done", "failed", "interrupted"]
ALIVE = ("starting", "running")
"""States of a rank that goes on."""
Stage = Literal["starting", "render", "base", "cold_start", "done", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """One rank's state."""

    rank: int
    state: State
    step: int = 0
    phase: str = ""
    exit_code: int | None = None
    """What the program should end with on this rank's account; None while it runs."""
    message: str = ""
    hint: str | None = None
    error: str = ""
    """Class name of the exception that ended the rank."""
    waiting: list[str] = field(default_factory=list)
    """What the rank waits for, one line each."""
    pid: int | None = None
    host: str = ""
    """Name of the node the rank runs on."""
    time: float = field(default_factory=time.time)
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareStatus:
    """Progress of the preparation; `step` of `total` counts clips in `render` and steps in `cold_start`."""

    stage: Stage
    step: int = 0
    total: int = 0
    loss: float | None = None
    accuracy: float | None = None
    message: str = ""
    hint: str | None = None
    error: str = ""
    exit_code: int | None = None
    time: float = field(default_factory=time.time)


def failed_rank(
    rank: int, error: BaseException, *, step: int = 0, phase: str = "", waiting: list[str] | None = None
) -> RankStatus:
    """The status of this process's rank, which an exception ended. An InterruptedRunError makes it `interrupted`."""
    interrupted = isinstance(error, errors.InterruptedRunError | KeyboardInterrupt)
    return RankStatus(
        rank=rank,
        state="interrupted" if interrupted else "failed",
        step=step,
        phase=phase,
        waiting=waiting or [],
        pid=os.getpid(),
        host=socket.gethostname(),
        **_describe(error),
    )


def failed_prepare(error: BaseException) -> PrepareStatus:
    """The status of a preparation that an exception ended."""
    return PrepareStatus(stage="failed", **_describe(error))


def error_of(status: RankStatus | PrepareStatus) -> errors.RollplexError:
    """The exception a status stands for; exceptions that are not ours become RunFailedError."""
    kind = getattr(errors, status.error, None)
    known = isinstance(kind, type) and issubclass(kind, errors.RollplexError)
    error = cast("type[errors.RollplexError]", kind if known else errors.RunFailedError)(
        status.message or status.error or "the run failed", hint=status.hint
    )
    if status.exit_code:
        error.exit_code = status.exit_code
    return error


def write_status(path: Path, status: RankStatus | PrepareStatus) -> None:
    """Write a status so that a reader never sees a part of it.

    A rank's last word stands: `starting` and `running` do not replace it, since other threads of a rank may still
    report progress while it closes.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(status, RankStatus) and status.state in ALIVE:
        before = read_status(path)
        if before is not None and before.state not in ALIVE:
            return
    write_atomic(path, json.dumps(dataclasses.asdict(status)) + "\n")


def read_status(path: Path) -> RankStatus | None:
    """A rank's status; None where there is none (or none that can be read) yet."""
    row = _known_fields(read_json(path), RankStatus)
    if row is None or row.get("state") not in get_args(State) or "rank" not in row:
        return None
    return RankStatus(**row)


def read_prepare_status(path: Path) -> PrepareStatus | None:
    """The preparation's status; None where there is none (or none that can be read) yet."""
    row = _known_fields(read_json(path), PrepareStatus)
    if row is None or row.get("stage") not in get_args(Stage):
        return None
    return PrepareStatus(**row)


def _describe(error: BaseException) -> dict[str, Any]:
    if isinstance(error, errors.RollplexError):
        message, hint, code = error.message, error.hint, error.exit_code
    else:
        message, hint = f"{type(error).__name__}: {error}", None
        code = 75 if isinstance(error, KeyboardInterrupt) else 1
    return {"message": message, "hint": hint, "exit_code": code, "error": type(error).__name__}


def _known_fields(row: dict[str, Any] | None, kind: type[RankStatus | PrepareStatus]) -> dict[str, Any] | None:
    if row is None:
        return None
    names = {item.name for item in dataclasses.fields(kind)}
    return {key: value for key, value in row.items() if key in names}
