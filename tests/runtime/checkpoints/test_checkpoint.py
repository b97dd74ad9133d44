"""Checkpoints: complete or absent, whatever happens to the writer, and readable in any layout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.engines.weights.shards import Box
from rollplex_cli.runtime import checkpoint
from rollplex_cli.runtime.checkpoint import Entry

WRITER = Path(__file__).with_name("checkpoint_writer.py")


def whole(name: str, values: torch.Tensor) -> Entry:
    return Entry(tensor=name, full=tuple(values.shape), box=Box.whole(tuple(values.shape)), values=values)


def write(folder: Path, step: int, *writers: list[Entry], keep: int = 2) -> None:
    checkpoint.begin(folder, step)
    files: dict[str, int] = {}
    for number, entries in enumerate(writers):
        files |= checkpoint.write(folder, step, number, entries)
    checkpoint.commit(folder, step, files, {"updates": step}, keep)


def test_pieces_of_any_layout_are_read_in_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "CHUNK_BYTES", 64)
    values, bias = torch.arange(48.0).view(8, 6), torch.arange(8.0)
    shards = [
        [
            Entry(tensor="w", full=(8, 6), box=Box((0, 3 * i), (8, 3)), values=values[:, 3 * i : 3 * i + 3]),
            Entry(tensor="b", full=(8,), box=Box((4 * i,), (4,)), values=bias[4 * i : 4 * i + 4]),
        ]
        for i in range(2)
    ]
    write(tmp_path, 4, *shards)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 4 and found.state["updates"] == 4
    assert len([f for f in found.state["files"] if f.endswith(".safetensors")]) == 4  # in chunks
    assert found.shapes() == {"w": (8, 6), "b": (8,)}
    assert torch.equal(found.read("w"), values)
    for rows in range(4):
        box = Box((2 * rows, 1), (2, 4))
        assert torch.equal(found.read("w", box), values[box.slices()])
    assert torch.equal(found.read("b", Box((2,), (4,))), bias[2:6])
    with pytest.raises(RunFailedError, match="has no tensor `v`"):
        found.read("v")
    with pytest.raises(RunFailedError, match="has 0 of 8 elements asked of `b`"):
        found.read("b", Box((8,), (8,)))


def test_what_is_not_complete_is_not_chosen(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, [whole("w", torch.full((4,), float(step)))], keep=3)
    (tmp_path / "step-000003" / "part-00000-00000.safetensors").write_bytes(b"short")
    (tmp_path / ".writing-step-000009").mkdir()
    (tmp_path / "step-000007").mkdir()
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 2
    assert (found.read("w") == 2).all()
    write(tmp_path, 4, [whole("w", torch.ones(4))], keep=2)
    assert sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("step-00000")) == [
        "step-000002", "step-000003", "step-000004", "step-000007",
    ]  # fmt: skip
    write(tmp_path, 5, [whole("w", torch.ones(4))], keep=2)
    assert not (tmp_path / "step-000002").exists()


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["state.json", "index-00000.json", "part-00000-00000.safetensors"]), st.integers(0, 200))
def test_a_truncated_checkpoint_is_never_chosen(tmp_path_factory: pytest.TempPathFactory, name: str, size: int) -> None:
    folder = tmp_path_factory.mktemp("checkpoints")
    for step in (1, 2):
        write(folder, step, [whole("w", torch.ones(4))], keep=5)
    torn = folder / "step-000002" / name
    torn.write_bytes(torn.read_bytes()[: min(size, torn.stat().st_size - 1)])
    found = checkpoint.newest(folder)
    assert found is not None and found.step == 1


def test_the_best_is_kept_beyond_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.begin(tmp_path, step)
        files = checkpoint.write(tmp_path, step, 0, [whole("w", torch.ones(4))])
        checkpoint.commit(tmp_path, step, files, {}, keep=1, is_best=step == 1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["best", "latest", "step-000001", "step-000003"]
    best = checkpoint.best(tmp_path)
    assert best is not None and best.step == 1
    assert checkpoint.newest(tmp_path / "missing") is None


@pytest.mark.scenario
def test_a_writer_killed_at_any_moment_of_twenty_writes(tmp_path: Path) -> None:
    """Twenty writes are torn; after each kill, those between two writes included, the newest checkpoint is complete,
    whole, and never older than the last one that the writer had finished."""
    done = subprocess.run(
        [sys.executable, str(WRITER), "kill", str(tmp_path), "20"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    kills = json.loads(done.stdout)
    assert sum(kill["in_the_middle"] for kill in kills) == 20  # a draft was lying there


@pytest.mark.scenario
def test_a_disk_that_fills_up_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(WRITER), "full", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout)
    assert told["message"].startswith("cannot write the checkpoint of step 2: ")
    assert "File too large" in told["message"] or "os error 27" in told["message"]
    assert "--resume" in told["hint"]
    assert told["newest"] == 1
