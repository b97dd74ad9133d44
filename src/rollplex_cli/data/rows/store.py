"""Samples of a run in one file a split: what its data set said when the run began."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.files import read_jsonl, write_atomic
from rollplex_cli.data.types import MediaRef, Message, Sample

if TYPE_CHECKING:
    from collections.abc import Sequence


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write samples, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, "".join(json.dumps(_to_json(sample)) + "\n" for sample in samples))


def read_samples(path: Path) -> list[Sample]:
    """Samples as `write_samples` got them."""
    return [_from_json(row) for row in read_jsonl(path)]


def _to_json(sample: Sample) -> dict[str, Any]:
    messages = [[m.role, [p if isinstance(p, str) else _media(p) for p in m.content]] for m in sample.messages]
    return {
        "sample_id": sample.sample_id,
        "question": sample.question,
        "answer": sample.answer,
        "kind": sample.kind,
        "media": [_media(m) for m in sample.media],
        "extra": sample.extra,
        "messages": messages,
    }


def _from_json(row: dict[str, Any]) -> Sample:
    messages = [
        Message(role=role, content=tuple(p if isinstance(p, str) else _reference(p) for p in content))
        for role, content in row["messages"]
    ]
    media = tuple(_reference(m) for m in row["media"])
    return Sample(**{**row, "media": media, "messages": tuple(messages)})


def _media(reference: MediaRef) -> dict[str, str]:
    return {"kind": reference.kind, "path": str(reference.path)}


def _reference(value: dict[str, Any]) -> MediaRef:
    return MediaRef(kind=value["kind"], path=Path(value["path"]))
