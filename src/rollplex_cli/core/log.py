"""Talk to the user goes to stderr; a rank's output goes to its own file. stdout is for data."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

FORMAT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


def talk(message: str) -> None:
    """One line to the user on stderr, exactly as given (no markup)."""
    with contextlib.suppress(OSError):  # nobody is left to hear it; the exit code still says how it ended
        sys.stderr.write(message + "\n")
        sys.stderr.flush()


def warn(message: str) -> None:
    """A `warning:` line on stderr: something in the user's settings has no effect or a doubtful one."""
    talk(f"warning: {message}")


def redirect_output(path: Path) -> None:
    """Send this process's stdout and stderr, those of C libraries included, to the end of a file.

    A rank calls it first, so that nothing it prints reaches the user's terminal.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)


def setup_logging(level: int = logging.INFO) -> None:
    """Python's logging to stderr with time, level and logger; replaces handlers set by libraries."""
    logging.basicConfig(level=level, format=FORMAT, stream=sys.stderr, force=True)
