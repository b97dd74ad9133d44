"""A checkpoint is complete or it does not exist."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.runtime import checkpoint

if TYPE_CHECKING:
    from pathlib import Path

TENSORS = {"master/a": torch.arange(6.0).view(2, 3), "updates": torch.tensor(7)}
STATE = {"progress": {"step": 3}}


def test_what_is_saved_is_found(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 3, TENSORS, STATE, keep=2)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 3
    assert found.state["progress"] == {"step": 3}
    for name, tensor in found.tensors().items():
        assert torch.equal(tensor, TENSORS[name])
    assert (tmp_path / "latest").read_text() == "step-000003\n"


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        checkpoint.save(tmp_path, step, TENSORS, STATE, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-000003", "step-000010"]


def test_the_best_is_kept_besides_the_newest(tmp_path: Path) -> None:
    assert checkpoint.best(tmp_path) is None
    for step in (1, 2, 3, 10, 11):
        checkpoint.save(tmp_path, step, TENSORS, STATE, keep=2, is_best=step in (1, 2))
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["best", "latest", "step-000002", "step-000010", "step-000011"]
    found = checkpoint.best(tmp_path)
    assert found is not None
    assert found.step == 2


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["state.json", "optimizer.safetensors"]), st.integers(0, 200))
def test_a_truncated_checkpoint_is_never_chosen(tmp_path_factory: pytest.TempPathFactory, name: str, size: int) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    checkpoint.save(folder, 1, TENSORS, STATE, keep=5)
    torn = checkpoint.save(folder, 2, TENSORS, STATE, keep=5) / name
    whole = torn.stat().st_size
    torn.write_bytes(torn.read_bytes()[: min(size, whole - 1)])
    found = checkpoint.newest(folder)
    assert found is not None
    assert found.step == 1


def test_a_folder_in_the_middle_of_being_written_is_ignored_and_replaced(tmp_path: Path) -> None:
    draft = tmp_path / ".writing-step-000004"
    draft.mkdir()
    (draft / "state.json").write_text("{}")
    assert checkpoint.newest(tmp_path) is None
    checkpoint.save(tmp_path, 4, TENSORS, STATE, keep=1)
    assert checkpoint.newest(tmp_path) is not None
    assert not draft.exists()


def test_a_full_disk_leaves_the_old_checkpoint_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, 1, TENSORS, STATE, keep=1)

    def full(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "_sync", full)
    with pytest.raises(RunFailedError, match="cannot write the checkpoint of step 2: No space left on device"):
        checkpoint.save(tmp_path, 2, TENSORS, STATE, keep=1)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_no_folder_is_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "missing") is None
