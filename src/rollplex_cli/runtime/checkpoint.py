"""Checkpoints: safetensors and JSON, written beside and renamed into place, never pickle.

A checkpoint is a folder `step-000020` with the optimizer's tensors by Hugging Face parameter name (independent of
how ranks lay them out) and `state.json`, which also lists every file with its size. `latest` names the newest one.
A folder that is being written has another name, so a kill at any moment leaves the previous checkpoint in place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.core.files import read_json, write_atomic

if TYPE_CHECKING:
    from pathlib import Path

    import torch

_NAME = re.compile(r"^(?:\.replaced-)?step-(\d{6,})$")
"""A `.replaced-` folder stands in for the moment between two renames."""
STATE, TENSORS, LATEST, BEST = "state.json", "optimizer.safetensors", "latest", "best"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps done when it was written."""
        return int(self.state["step"])

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors, on the CPU."""
        return load_file(self.path / TENSORS)


def save(
    folder: Path,
    step: int,
    tensors: dict[str, torch.Tensor],
    state: dict[str, Any],
    keep: int,
    *,
    is_best: bool = False,
) -> Path:
    """Write a checkpoint and drop all but the newest `keep` and the one that was last said to be the best.

    Raises:
        RunFailedError: the disk refused; the earlier checkpoints are untouched.
    """
    final, draft = folder / f"step-{step:06d}", folder / f".writing-step-{step:06d}"
    replaced = folder / f".replaced-{final.name}"
    try:
        for torn in folder.glob(".writing-*"):  # of a run that was killed, of this step or another
            shutil.rmtree(torn, ignore_errors=True)
        draft.mkdir(parents=True)
        save_file({name: t.contiguous() for name, t in tensors.items()}, draft / TENSORS)
        _sync(draft / TENSORS)
        sizes = {TENSORS: (draft / TENSORS).stat().st_size}
        (draft / STATE).write_text(json.dumps({**state, "step": step, "files": sizes}), encoding="utf-8")
        _sync(draft / STATE)
        _sync(draft)
        if final.exists():  # the same step once more, after its evaluation
            if _is_complete(final):
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)
            else:
                shutil.rmtree(final)
        draft.rename(final)
        _sync(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        write_atomic(folder / LATEST, final.name + "\n")
        if is_best:
            write_atomic(folder / BEST, final.name + "\n")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(draft, ignore_errors=True)
        raise RunFailedError(
            f"cannot write the checkpoint of step {step}: {getattr(error, 'strerror', None) or error}: {final}",
            hint="earlier checkpoints are intact; free space and start again with `--resume`",
        ) from error
    for old in sorted(_complete(folder), key=lambda c: c.step)[: -max(1, keep)]:
        if old.path.name != _named(folder / BEST):
            shutil.rmtree(old.path, ignore_errors=True)
    return final


def best(folder: Path) -> Checkpoint | None:
    """The checkpoint that `best` names, or None."""
    name = _named(folder / BEST)
    return next((c for c in _complete(folder) if c.path.name == name), None)


def _named(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def newest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint, or None. `latest` is a convenience for people: what counts is completeness."""
    return max(_complete(folder), key=lambda c: c.step, default=None)


def _complete(folder: Path) -> list[Checkpoint]:
    found = (_read(path) for path in (folder.iterdir() if folder.is_dir() else ()) if _NAME.match(path.name))
    return [checkpoint for checkpoint in found if checkpoint is not None]


def _is_complete(path: Path) -> bool:
    return _read(path) is not None


def _read(path: Path) -> Checkpoint | None:
    state = read_json(path / STATE)
    if state is None or "step" not in state:
        return None
    files = state.get("files", {})
    whole = all((path / f).is_file() and (path / f).stat().st_size == size for f, size in files.items())
    return Checkpoint(path=path, state=state) if whole else None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
