"""Worker scripts on several ranks, one process each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import warm

if TYPE_CHECKING:
    from collections.abc import Callable


def run_ranks(num_ranks: int, arguments: Callable[[int], list[str]], timeout_s: float = 240.0) -> None:
    """Run the interpreter with `arguments(rank)` for every rank at once; all have to end with exit code 0."""
    ranks = warm.run([arguments(rank) for rank in range(num_ranks)], timeout_s=timeout_s)
    logs = (f"{rank.stdout[-1000:]}{rank.stderr[-3000:]}" for rank in ranks)
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(logs)
