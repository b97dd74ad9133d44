"""Files that are read while others write them: whole-file replacement and rows that may be torn."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any


def write_atomic(path: Path, text: str) -> None:
    """Replace a file's text in one step: a reader sees the old text or the new one, never a part."""
    # Two threads of one process may report at the same time, so the name needs more than the process id.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """A file's JSON object; None where the file is missing or holds anything else."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Every JSON object of a file with one per line; torn and empty lines are left out, a missing file is empty.

    A process killed while writing leaves a torn line, and a resumed one appends behind it.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def read_tail(path: Path, num_lines: int = 20, max_bytes: int = 65536) -> list[str]:
    """The last non-empty lines of a text file; an unreadable file has none."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            stream.seek(max(0, stream.tell() - max_bytes))
            text = stream.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()][-num_lines:]
