"""Rows of a data set's files as plain dictionaries: JSONL, JSON, parquet, and folders of them or of Arrow files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")


def read_rows(path: Path, split: str = "train") -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:number`, row) for every row, in the order of the files' names and of their lines.

    Args:
        path: a file, or a folder: one written by `datasets.save_to_disk`, or any with parquet or JSONL files.
        split: which one, where a saved data set has several.

    Raises:
        DataError: nothing to read there, or a file that is damaged or holds something other than rows.
    """
    files = [path] if path.is_file() else _files(path, split)
    for file in files:
        if file.suffix not in SUFFIXES:
            raise DataError(f"rows are read from {', '.join(SUFFIXES)} files: {file}")
        rows = _lines(file) if file.suffix in (".jsonl", ".json") else _columns(file)
        for number, row in enumerate(rows, start=1):
            if not isinstance(row, dict):
                raise DataError(f"a row is not a mapping of columns to values: {file.name}:{number}")
            yield f"{file.name}:{number}", row


def _files(folder: Path, split: str) -> list[Path]:
    if not folder.is_dir():
        raise DataError(f"no such data set: {folder}")
    if (folder / "dataset_dict.json").is_file():
        splits = _list_of(_json(folder / "dataset_dict.json").get("splits"), str, folder / "dataset_dict.json")
        if split not in splits:
            raise DataError(f"data set has no split `{split}`, only {', '.join(splits)}: {folder}")
        folder = folder / split
    if (folder / "state.json").is_file():
        state = _json(folder / "state.json")
        if state.get("_indices_files") or state.get("_indices_data_files"):
            raise DataError(
                f"data set was saved with an order apart from its rows: {folder}",
                hint="call `flatten_indices()` before `save_to_disk`",
            )
        listed = _list_of(state.get("_data_files"), dict, folder / "state.json")
        return [folder / str(item.get("filename")) for item in listed]
    found = sorted(
        file for suffix in SUFFIXES for file in folder.glob(f"*{suffix}") if file.name != "dataset_info.json"
    )
    if not found:
        raise DataError(f"no {', '.join(SUFFIXES)} files in: {folder}")
    if len({file.suffix for file in found}) > 1:
        raise DataError(f"files of several kinds, name one of them or their own folder: {folder}")
    return found


def _lines(path: Path) -> Iterator[Any]:
    """A row a line, or one list of rows."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"rows cannot be read ({error}): {path}") from None
    if path.suffix == ".json" and text.lstrip().startswith("["):
        yield from _parsed(text, str(path))
        return
    # Not splitlines(): JSON strings may hold separators that it takes for ends of lines.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _parsed(line, f"{path.name}:{number}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"row is not valid JSON ({error}): {where}") from None


def _list_of(value: Any, kind: type, path: Path) -> list[Any]:
    if not isinstance(value, list) or not all(isinstance(item, kind) for item in value):
        raise DataError(f"saved data set is damaged: {path}")
    return value


def _json(path: Path) -> dict[str, Any]:
    try:
        value = _parsed(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"saved data set cannot be read ({error}): {path}") from None
    if not isinstance(value, dict):
        raise DataError(f"not a mapping: {path}")
    return value


def _columns(path: Path) -> Iterator[Any]:
    """Rows of a parquet or Arrow file, a batch at a time."""
    import pyarrow as pa
    import pyarrow.ipc
    import pyarrow.parquet

    try:
        if path.suffix == ".parquet":
            with pyarrow.parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(batch_size=256):
                    yield from batch.to_pylist()
            return
        with pa.memory_map(str(path)) as source:
            for batch in pyarrow.ipc.open_stream(source):
                yield from batch.to_pylist()
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:  # text and times that Python cannot hold
        raise DataError(f"rows cannot be read ({error}): {path}") from None
