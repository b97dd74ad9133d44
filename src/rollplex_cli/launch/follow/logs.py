"""What a run prints, from all of its files or one rank's, once or as it goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.files import read_tail
from rollplex_cli.launch.follow.status import GOING_ON, run_status

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rollplex_cli.core.paths import RunFolder

POLL_S = 0.2
STATE_EVERY_S = 2.0


def log_files(run: RunFolder, rank: int | None) -> dict[str, Path]:
    """Logs by the name they are shown under, in the order of a run's life.

    Raises:
        UsageError: the run has no such rank.
    """
    if rank is not None:
        path = run.rank_log(rank)
        if not path.is_file():
            known = sorted(int(p.stem.removeprefix("rank")) for p in run.logs_dir.glob("rank*.log"))
            hint = f"ranks with a log: {known[0]} to {known[-1]}" if known else "no rank has written anything yet"
            raise UsageError(f"the run has no log of rank: {rank}", hint=hint)
        return {f"rank {rank}": path}
    files = {"job": run.job_log, "prepare": run.prepare_log}
    launchers = sorted(run.logs_dir.glob("torchrun*.log"))
    files |= {path.stem: path for path in launchers}
    ranks = sorted(run.logs_dir.glob("rank*.log"), key=lambda path: int(path.stem.removeprefix("rank")))
    files |= {path.stem.replace("rank", "rank "): path for path in ranks}
    return {name: path for name, path in files.items() if path.is_file()}


def show_logs(run: RunFolder, write: Callable[[str], None], *, rank: int | None, num_lines: int) -> None:
    """The last lines of each log; several are told apart by a prefix. Raises UsageError as `log_files`."""
    files = log_files(run, rank)
    for name, path in files.items():
        for line in read_tail(path, num_lines, max_bytes=1 << 22):
            write(_prefixed(name, line, several=rank is None))


def follow_logs(run: RunFolder, write: Callable[[str], None], *, rank: int | None, num_lines: int) -> None:
    """As `show_logs`, then every new line until the run has ended. Raises UsageError as `log_files`."""
    tails: dict[str, _Tail] = {}
    next_look, over = 0.0, False
    while True:
        if rank is not None and not tails and not run.rank_log(rank).exists() and not over:
            files: dict[str, Path] = {}  # it may come yet
        else:
            files = log_files(run, rank)
        for name, path in files.items():
            tail = tails.setdefault(name, _Tail(path, num_lines if next_look == 0.0 else None))
            for line in tail.read_new():
                write(_prefixed(name, line, several=rank is None))
        if over:
            return
        if time.monotonic() > next_look:
            next_look = time.monotonic() + STATE_EVERY_S
            # What was written before the end is read once more after it was seen.
            over = run_status(run).state not in GOING_ON
        if not over:
            time.sleep(POLL_S)


class _Tail:
    """Whole lines added to a file; at first its last lines (None: all of it)."""

    def __init__(self, path: Path, num_lines: int | None) -> None:
        self._path, self._offset = path, 0
        if num_lines is not None:
            data = path.read_bytes()
            lines = data.splitlines(keepends=True)
            self._offset = len(data) - sum(len(line) for line in lines[len(lines) - min(num_lines, len(lines)) :])

    def read_new(self) -> list[str]:
        """Lines completed since the last call; from the start where the file was replaced by a shorter one."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(0, 2)
                if stream.tell() < self._offset:
                    self._offset = 0
                stream.seek(self._offset)
                chunk = stream.read()
        except OSError:
            return []
        whole, newline, _ = chunk.rpartition(b"\n")
        self._offset += len(whole) + len(newline)
        return whole.decode(errors="replace").splitlines() if newline else []


def _prefixed(name: str, line: str, *, several: bool) -> str:
    return f"[{name}] {line}" if several else line
