"""Worker scripts on several ranks, one process each."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def run_ranks(num_ranks: int, arguments: Callable[[int], list[str]], timeout_s: float = 240.0) -> None:
    """Run the interpreter with `arguments(rank)` for every rank at once; all have to end with exit code 0."""
    ranks = [
        subprocess.Popen(
            [sys.executable, *arguments(rank)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for rank in range(num_ranks)
    ]
    try:
        logs = [rank.communicate(timeout=timeout_s)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(log[-3000:] for log in logs)
