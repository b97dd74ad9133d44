"""Every process that the launcher starts, signals or looks at. The only importer of the standard `subprocess`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PROC = Path("/proc")


class Child:
    """A process in a session of its own, its output appended to a log file.

    The session keeps the terminal's Ctrl-C away from it: the supervisor decides what the child is told.
    """

    def __init__(self, argv: Sequence[str], *, log: Path, env: Mapping[str, str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                list(argv),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=dict(env),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def poll(self) -> int | None:
        """Exit code (negative: ended by that signal); None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end; None if it did not come in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        return None

    def send(self, number: int) -> None:
        """Signal the child itself."""
        if self.poll() is None:
            self._process.send_signal(number)

    def kill_tree(self) -> None:
        """End the child and everything below it, without asking, and wait for the child."""
        pids = [self.pid, *descendants(self.pid)] if self.poll() is None else []
        send_signal(pids, signal.SIGKILL)
        self.wait(10.0)


def run_text(argv: Sequence[str], timeout_s: float = 10.0) -> str | None:
    """stdout of a short command; None if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(list(argv), capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 else None


def send_signal(pids: Iterable[int], number: int) -> None:
    """Signal processes; those that are gone already are passed over."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_processes(pids: Iterable[int], limit_s: float = 5.0) -> None:
    """End processes without asking, and wait until they are gone."""
    waiting, end = set(pids), time.monotonic() + limit_s
    send_signal(waiting, signal.SIGKILL)
    while waiting & living() and time.monotonic() < end:
        time.sleep(0.02)


def living() -> set[int]:
    """Ids of all processes, zombies left out."""
    return set(_parents())


def children(pid: int) -> list[int]:
    """Process ids whose parent is `pid`, zombies left out."""
    return [child for child, parent in _parents().items() if parent == pid]


def descendants(pid: int) -> list[int]:
    """Process ids below `pid`, parents before children."""
    parents = _parents()
    found, frontier = [], [pid]
    while frontier:
        frontier = [child for child, parent in parents.items() if parent in frontier]
        found += frontier
    return found


def find_processes(*arguments: str, variable: str | None = None) -> list[int]:
    """Process ids whose command line holds all of these arguments, and whose environment holds `NAME=value`."""
    found = []
    for path in PROC.glob("[0-9]*/cmdline"):
        try:
            given = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if all(argument in given for argument in arguments) and (variable is None or variable in _environment(path)):
            found.append(int(path.parent.name))
    return found


def _environment(cmdline: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return cmdline.with_name("environ").read_bytes().decode(errors="replace").split("\0")
    return []


def _parents() -> dict[int, int]:
    """Process id to parent id of every living process (empty where there is no /proc)."""
    table = {}
    for path in PROC.glob("[0-9]*/stat"):
        try:
            # The command in parentheses may hold spaces and parentheses itself.
            state, parent = path.read_text(errors="replace").rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if state != "Z":
            table[int(path.parent.name)] = int(parent)
    return table
