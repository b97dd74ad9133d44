"""Creating a run folder, and taking one up again."""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.files import write_atomic
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.resources import CHECKOUT
from rollplex_cli.launch.subprocess import run_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

LOCK = ".lock"
START_MARK = "=== resumed"
"""Begins the line in a rank's log that separates one start of a run from the next."""


def default_run_dir(parent: Path, profile_name: str) -> Path:
    """`<parent>/<profile>-<local time>`, with a counter where two runs start within a second."""
    stem = f"{profile_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    candidates = [parent / stem, *(parent / f"{stem}-{number}" for number in range(2, 100))]
    return next(path for path in candidates if not path.exists())


def create_run(root: Path, *, profile_yaml: str, plan_json: str, argv: Sequence[str]) -> RunFolder:
    """Make a new run folder with everything that describes the run.

    Raises:
        UsageError: the folder exists and is not empty, or cannot be made.
    """
    if root.is_dir() and any(root.iterdir()):
        hint = "choose another `--run-dir`; a training run is continued with `rollplex train --resume`"
        raise UsageError(f"the run folder exists: `{root}`", hint=hint)
    run = RunFolder(root)
    try:
        run.make()
    except OSError as error:
        hint = "`--run-dir` names a folder that is made, in a place you may write to"
        raise UsageError(f"cannot make the run folder `{root}`: {error.strerror}", hint=hint) from error
    _describe(run, profile_yaml, plan_json, argv)
    return run


def reopen_run(root: Path) -> RunFolder:
    """An existing run's folder. Raises UsageError if it is none."""
    run = RunFolder(root)
    if not run.profile.is_file():
        raise UsageError(f"not a run folder (no `profile.yaml`): `{root}`")
    return run


def resume_run(run: RunFolder, *, profile_yaml: str, plan_json: str, argv: Sequence[str]) -> None:
    """Bring a run folder up to date for another start; its checkpoints and metrics stay."""
    run.make()
    _describe(run, profile_yaml, plan_json, argv)


def lock_run(run: RunFolder) -> FileLock:
    """Hold a run folder for one supervisor; release it with `.release()`.

    Raises:
        UsageError: another process runs in it.
    """
    lock = FileLock(run.root / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise UsageError(f"another process is running in this folder: `{run.root}`") from error
    return lock


def begin_start(run: RunFolder) -> None:
    """Set an earlier start of the run apart: its ranks' statuses go, their logs get a line that ends it."""
    for path in run.status_dir.glob("rank*.json"):
        path.unlink(missing_ok=True)
    for path in run.logs_dir.glob("rank*.log"):
        with path.open("a", encoding="utf-8") as stream:
            stream.write(f"{START_MARK} {time.strftime('%Y-%m-%d %H:%M:%S')}\n")


def git_revision() -> str:
    """Commit of the program's checkout, `-dirty` appended where files differ from it; `unknown` outside one."""
    if not (CHECKOUT / ".git").exists():
        return "unknown"
    text = run_text(["git", "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])
    return (text or "unknown").strip()


def _describe(run: RunFolder, profile_yaml: str, plan_json: str, argv: Sequence[str]) -> None:
    write_atomic(run.profile, profile_yaml)
    write_atomic(run.plan, plan_json)
    write_atomic(run.git, git_revision() + "\n")
    with run.command.open("a", encoding="utf-8") as stream:
        stream.write(shlex.join(["rollplex", *argv[1:]]) + "\n")  # however it was called
