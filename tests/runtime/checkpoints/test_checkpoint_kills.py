"""A checkpoint is complete or absent, whatever moment the process or the disk ends at."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.engines.weights.shards import Box
from rollplex_cli.runtime import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def save(folder: Path, step: int, value: float = 0.0, keep: int = 1) -> None:
    values = torch.full((100_000,), value)
    entry = checkpoint.Entry(tensor="w", full=(100_000,), box=Box.whole((100_000,)), values=values)
    checkpoint.begin(folder, step)
    files = checkpoint.write(folder, step, 0, [entry])
    checkpoint.commit(folder, step, files, {"progress": {"step": step}}, keep)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Killed(BaseException):
    """Ends the process at this point, as signal 9 would: nothing that could handle it runs."""


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file may grow beyond 100 KiB: what a full disk does to a large file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100 << 10, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_a_clear_error_and_leaves_nothing_behind(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    save(tmp_path, 1)
    request.getfixturevalue("small_files")
    with pytest.raises(RunFailedError, match="cannot write the checkpoint of step 2") as raised:
        save(tmp_path, 2)
    checkpoint.discard(tmp_path, 2)  # what the run does when a rank could not write
    assert raised.value.hint is not None and "--resume" in raised.value.hint
    assert names(tmp_path) == ["latest", "step-000001"]


def calls(monkeypatch: pytest.MonkeyPatch, kill_at: int) -> list[str]:
    """Counts changes of the folder; the one numbered `kill_at` never happens, nor does anything after it."""
    seen: list[str] = []

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if len(seen) >= kill_at:
                raise Killed
            seen.append(name)
            return original(*arguments, **options)

        return call

    monkeypatch.setattr(Path, "rename", wrap("rename", Path.rename))
    monkeypatch.setattr(Path, "mkdir", wrap("mkdir", Path.mkdir))
    monkeypatch.setattr(Path, "write_text", wrap("write_text", Path.write_text))
    monkeypatch.setattr(shutil, "rmtree", wrap("rmtree", shutil.rmtree))
    monkeypatch.setattr(checkpoint, "save_file", wrap("save_file", checkpoint.save_file))
    return seen


@pytest.mark.parametrize("second", [7, 8])
def test_killed_at_any_moment_one_good_checkpoint_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: int
) -> None:
    for moment in range(20):
        folder = tmp_path / str(moment)
        save(folder, 7, 1.0)
        with monkeypatch.context() as patch:
            calls(patch, moment)
            try:
                save(folder, second, 2.0)
            except Killed:
                over = False
            else:
                over = True
        found = checkpoint.newest(folder)
        assert found is not None, f"nothing left after {moment} changes"
        assert float(found.read("w")[0]) in (1.0, 2.0)
        save(folder, second, 3.0)
        found = checkpoint.newest(folder)
        assert found is not None and float(found.read("w")[0]) == 3.0
        assert names(folder) == ["latest", f"step-{second:06d}"]
        if over:
            return
    pytest.fail("saving never came to its end")
