"""Checkpoints: safetensors and JSON, written beside and renamed into place, never pickle.

A checkpoint is a folder `step-000020`. Every rank of one training group writes what it owns: files of at most about
`CHUNK_BYTES`, and an index that says which box of which Hugging Face tensor each entry is. So the checkpoint knows
nothing of the layout it was written in, and a run of other degrees reads the boxes that it needs. `state.json` lists
every file with its size; `latest` names the newest folder. A folder that is being written has another name, so a kill
at any moment leaves the previous checkpoint in place.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.core.files import read_json, write_atomic
from rollplex_cli.engines.weights.shards import Box
from rollplex_cli.engines.weights.staged import staged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_NAME = re.compile(r"^(?:\.replaced-)?step-(\d{6,})$")
"""A `.replaced-` folder stands in for the moment between two renames."""
STATE, LATEST, BEST = "state.json", "latest", "best"
CHUNK_BYTES = 1 << 30
"""A file is closed once it has this many bytes: what a rank copies on the host at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A box of a tensor, to be written."""

    tensor: str
    """Name over all ranks, such as `master/lm_head.weight`."""
    full: tuple[int, ...]
    """Shape of the whole tensor."""
    box: Box
    values: torch.Tensor
    """The elements of the box, in its shape."""


@dataclass(frozen=True, slots=True)
class _Stored:
    box: Box
    file: str
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    state: dict[str, Any]
    _index: dict[str, list[_Stored]] = field(default_factory=dict)
    _full: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Steps done when it was written."""
        return int(self.state["step"])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole tensors by name."""
        self._read_index()
        return dict(self._full)

    def read(self, tensor: str, box: Box | None = None) -> torch.Tensor:
        """A box of a tensor (all of it, if None), put together from whatever pieces it was written in.

        Raises:
            RunFailedError: no such tensor, a box that the pieces do not cover, or an unreadable file.
        """
        self._read_index()
        if tensor not in self._full:
            raise RunFailedError(f"the checkpoint `{self.path.name}` has no tensor `{tensor}`")
        box = box or Box.whole(self._full[tensor])
        out: torch.Tensor | None = None
        covered = 0
        for stored in self._index[tensor]:
            common = stored.box.intersection(box)
            if common is None:
                continue
            piece = self._piece(stored, common)
            if common == box:
                return piece
            out = torch.empty(box.shape, dtype=piece.dtype) if out is None else out
            out[common.slices(box.offset)] = piece
            covered += common.numel
        if out is None or covered != box.numel:
            raise RunFailedError(
                f"the checkpoint `{self.path.name}` has {covered} of {box.numel} elements asked of `{tensor}`",
                hint="its files were written by ranks that trained another model, or changed since",
            )
        return out

    def _piece(self, stored: _Stored, common: Box) -> torch.Tensor:
        path = self.path / stored.file
        try:
            with safe_open(path, framework="pt") as opened:
                piece: torch.Tensor = opened.get_slice(stored.key)[common.slices(stored.box.offset)]
        except (SafetensorError, OSError) as error:
            raise RunFailedError(f"cannot read the checkpoint file `{path}`: {error}") from error
        return piece

    def _read_index(self) -> None:
        if self._full:
            return
        for file in self.state["files"]:
            if not file.startswith("index-"):
                continue
            for row in (read_json(self.path / file) or {}).get("entries", []):
                stored = _Stored(Box(tuple(row["offset"]), tuple(row["shape"])), row["file"], row["key"])
                self._index.setdefault(row["tensor"], []).append(stored)
                self._full[row["tensor"]] = tuple(row["full"])


# ---- writing -------------------------------------------------------------------------------------------------


def begin(folder: Path, step: int) -> None:
    """Make an empty draft; one rank does, before any writes."""
    draft = _draft(folder, step)
    with _reported(folder, step):
        for torn in folder.glob(".writing-*"):  # of a run that was killed, of this step or another
            shutil.rmtree(torn, ignore_errors=True)
        draft.mkdir(parents=True)


def write(folder: Path, step: int, writer: int, entries: Iterable[Entry]) -> dict[str, int]:
    """Write one rank's entries into the draft; returns its files with their sizes."""
    draft = _draft(folder, step)
    sizes: dict[str, int] = {}
    rows = []
    with _reported(folder, step):
        for number, chunk in enumerate(_chunks(entries)):
            file = f"part-{writer:05d}-{number:05d}.safetensors"
            tensors = {f"{i}": staged(entry.values) for i, entry in enumerate(chunk)}
            save_file(tensors, draft / file)
            sizes[file] = _synced_size(draft / file)
            rows += [
                {
                    "tensor": e.tensor, "full": e.full, "offset": e.box.offset, "shape": e.box.shape,
                    "file": file, "key": str(i),
                }
                for i, e in enumerate(chunk)
            ]  # fmt: skip
        index = f"index-{writer:05d}.json"
        (draft / index).write_text(json.dumps({"entries": rows}), encoding="utf-8")
        sizes[index] = _synced_size(draft / index)
    return sizes


def commit(
    folder: Path, step: int, files: dict[str, int], state: dict[str, Any], keep: int, *, is_best: bool = False
) -> Path:
    """Give a fully written draft its name and drop all but the newest `keep` and the one that was last said to be the
    best; one rank does."""
    final, draft = folder / f"step-{step:06d}", _draft(folder, step)
    replaced = folder / f".replaced-{final.name}"
    with _reported(folder, step):
        text = json.dumps({**state, "step": step, "files": files})
        (draft / STATE).write_text(text, encoding="utf-8")
        _synced_size(draft / STATE)
        _synced_size(draft)
        if final.exists():  # the same step once more, after its evaluation
            if _read(final) is not None:
                shutil.rmtree(replaced, ignore_errors=True)
                final.rename(replaced)
            else:
                shutil.rmtree(final)
        draft.rename(final)
        _synced_size(folder)
        shutil.rmtree(replaced, ignore_errors=True)
        write_atomic(folder / LATEST, final.name + "\n")
        if is_best:
            write_atomic(folder / BEST, final.name + "\n")
    for old in sorted(_complete(folder), key=lambda c: c.step)[: -max(1, keep)]:
        if old.path.name != _named(folder / BEST):
            shutil.rmtree(old.path, ignore_errors=True)
    return final


def discard(folder: Path, step: int) -> None:
    """Drop a draft that cannot be completed."""
    shutil.rmtree(_draft(folder, step), ignore_errors=True)


def newest(folder: Path) -> Checkpoint | None:
    """The newest complete checkpoint, or None. `latest` is a convenience for people: what counts is completeness."""
    return max(_complete(folder), key=lambda c: c.step, default=None)


def best(folder: Path) -> Checkpoint | None:
    """The checkpoint that `best` names, or None."""
    name = _named(folder / BEST)
    return next((c for c in _complete(folder) if c.path.name == name), None)


def _named(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def _draft(folder: Path, step: int) -> Path:
    return folder / f".writing-step-{step:06d}"


@contextmanager
def _reported(folder: Path, step: int) -> Iterator[None]:
    """Turns what a disk says into the error of a run; earlier checkpoints are untouched by then."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise RunFailedError(
            f"cannot write the checkpoint of step {step}: {reason}: {folder}",
            hint="earlier checkpoints are intact; free space and start again with `--resume`",
        ) from error


def _chunks(entries: Iterable[Entry]) -> Iterator[list[Entry]]:
    chunk: list[Entry] = []
    size = 0
    for entry in entries:
        chunk.append(entry)
        size += entry.values.numel() * entry.values.element_size()
        if size >= CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _complete(folder: Path) -> list[Checkpoint]:
    found = (_read(path) for path in (folder.iterdir() if folder.is_dir() else ()) if _NAME.match(path.name))
    return [checkpoint for checkpoint in found if checkpoint is not None]


def _read(path: Path) -> Checkpoint | None:
    """The checkpoint in a folder; None where it is not complete."""
    state = read_json(path / STATE)
    if state is None or "step" not in state:
        return None
    files = state.get("files", {})
    whole = files and all((path / f).is_file() and (path / f).stat().st_size == size for f, size in files.items())
    return Checkpoint(path=path, state=state) if whole else None


def _synced_size(path: Path) -> int:
    """Force a file or folder to disk; its size."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return path.stat().st_size
