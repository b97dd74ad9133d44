"""A `rollplex` command within a time limit: its lines with their seconds as they come, and what a failed run left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[2]
GRACE_S = 20.0
"""What a command that is told to stop gets to end its processes."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    late: bool
    """Whether the limit ended it."""
    seconds: float
    lines: tuple[str, ...]
    """Standard output."""


def run_limited(arguments: Sequence[str], limit_s: float, *, show: bool = True) -> Ended:
    """Run `rollplex` from the checkout; its lines are printed as they come, unless standard output is its result."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "120"}
    argv, begun, late = [sys.executable, "-m", "rollplex_cli.cli.main", *arguments], time.monotonic(), threading.Event()
    stderr = subprocess.STDOUT if show else None
    process = subprocess.Popen(argv, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True)
    timer = threading.Timer(limit_s, lambda: (late.set(), _stop(process)))
    timer.start()
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if show:
            print(f"{time.monotonic() - begun:6.1f} s  {line.rstrip()}", flush=True)
    code = process.wait()
    timer.cancel()
    return Ended(code, late.is_set(), time.monotonic() - begun, tuple(lines))


def _stop(process: subprocess.Popen[str]) -> None:
    """Ask the command to end its processes, and insist."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def log_ends(run_dir: Path) -> Iterator[tuple[str, str]]:
    """Name and last lines of every log of a run."""
    for path in sorted(run_dir.glob("**/logs/*.log")):
        yield str(path), "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
