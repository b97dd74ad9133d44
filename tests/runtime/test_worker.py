"""How a rank ends: contexts that fail must not wait as they do at an orderly end."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from rollplex_cli.core.errors import InterruptedRunError, RunFailedError, StallError
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.status import read_status
from rollplex_cli.runtime.worker import _Session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def ended(tmp_path: Path, error: BaseException | None) -> list[str]:
    """What a context with a barrier at its orderly end goes through."""
    seen: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        try:
            yield
            seen.append("barrier")
        finally:
            seen.append("closed")

    session = _Session(RunFolder(tmp_path), 0)
    session._stack.enter_context(context())
    session.close(error)
    return seen


@pytest.mark.parametrize("error", [StallError("rank 1 is stopped"), RuntimeError("CUDA"), KeyboardInterrupt()])
def test_after_a_failure_nobody_waits_for_peers(tmp_path: Path, error: BaseException) -> None:
    assert ended(tmp_path, error) == ["closed"]


@pytest.mark.parametrize("error", [None, InterruptedRunError("stopped after step 3")])
def test_an_end_that_all_ranks_share_is_orderly(tmp_path: Path, error: BaseException | None) -> None:
    assert ended(tmp_path, error) == ["barrier", "closed"]


def test_a_full_disk_does_not_hide_the_exit_code(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a file")
    run.root.write_text("no folder can be made here")
    assert _Session(run, 0).report(RunFailedError("cannot write")) == 1
    assert read_status(run.status(0)) is None
