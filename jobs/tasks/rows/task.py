"""Any data set in files: JSONL, parquet or a saved Hugging Face data set, with videos, images or text alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.files import read_json, write_atomic
from rollplex_cli.data.rows.convert import TextOptions, to_sample
from rollplex_cli.data.rows.media import MediaFiles
from rollplex_cli.data.rows.read import read_rows
from rollplex_cli.data.rows.store import read_samples, write_samples
from rollplex_cli.data.tasks import load_task
from rollplex_cli.rl.rewards import exact_answer_parts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollplex_cli.data.types import Sample

OPTIONS: dict[str, Any] = {
    "path": "",
    "split": "train",
    "validation_path": "",
    "heldout_path": "",
    "num_heldout": 0,
    "max_rows": 0,
    "media_root": "",
    "allow_remote_media": False,
    "system": "",
    "instruction": "Give the final answer between <answer> and </answer>.",
    "default_kind": "exact",
}
"""Options with their defaults; README.md says what each does."""

REWARD_PARTS = {"auto": 0.9, "format": 0.1}
"""The reward where the profile names none."""

_MANIFEST = "dataset.json"
_VERSION = 1


def prepare(data_dir: Path, options: Mapping[str, Any], seed: int) -> None:
    """Read the data set and write its samples to `data_dir`/SPLIT.jsonl, media that rows contain to `data_dir`/media.

    A folder that was finished with the same options is left alone, whatever became of the data set since.

    Raises:
        UsageError: an unknown option, or one of another type.
        DataError: no such data set, or a row that cannot be used; it is named.
    """
    del seed
    values = _options(options)
    manifest = {"version": _VERSION, "options": values}
    if read_json(data_dir / _MANIFEST) == manifest:
        return
    (data_dir / _MANIFEST).unlink(missing_ok=True)
    train = _read(values["path"], values, data_dir)
    heldout = _read(values["heldout_path"], values, data_dir)
    if not heldout and (count := values["num_heldout"]):
        if count >= len(train):
            raise UsageError(f"task `rows`: `num_heldout` must be less than the number of rows ({len(train)}): {count}")
        train, heldout = train[:-count], train[-count:]
    validation = _read(values["validation_path"], values, data_dir)
    for split, samples_of in (("train", train), ("validation", validation), ("heldout", heldout)):
        write_samples(data_dir / f"{split}.jsonl", samples_of)
    # Last, so that an interrupted run is not taken for a finished one.
    write_atomic(data_dir / _MANIFEST, json.dumps(manifest, indent=2) + "\n")


def samples(data_dir: Path, split: str) -> list[Sample]:
    """Rows of a split (`train`, `validation`, `heldout`) of a prepared folder.

    Raises:
        UsageError: no such split, or the folder was never prepared.
    """
    if split not in ("train", "validation", "heldout"):
        raise UsageError(f"no such split, known are train, validation, heldout: {split}")
    if read_json(data_dir / _MANIFEST) is None:
        raise UsageError(f"no prepared data in: {data_dir}")
    return read_samples(data_dir / f"{split}.jsonl")


def reward(sample: Sample, text: str, finished: bool) -> dict[str, float]:
    """The plainest rule; `REWARD_PARTS` and the profile's `reward.parts` go before it."""
    return exact_answer_parts(text, sample.answer, finished)


def answer_text(sample: Sample) -> str:
    """The response that a cold start teaches, without the end token."""
    return f"<answer>{sample.answer}</answer>"


def build_base(base_dir: Path, data_dir: Path, config_json: Path, seed: int) -> None:
    """Random weights with the tokenizer of the task `shapes`, which falls back to bytes: any text has tokens."""
    load_task("shapes").build_base(base_dir, data_dir, config_json, seed)


def _options(options: Mapping[str, Any]) -> dict[str, Any]:
    if unknown := sorted(set(options) - set(OPTIONS)):
        raise UsageError(f"task `rows` has no option: {unknown[0]}", hint=f"options are {', '.join(OPTIONS)}")
    values = OPTIONS | dict(options)
    for name, value in values.items():
        if type(value) is not type(OPTIONS[name]):
            raise UsageError(f"task `rows`: `{name}` must be of type {type(OPTIONS[name]).__name__}: {value!r}")
        if isinstance(value, int) and value < 0:
            raise UsageError(f"task `rows`: `{name}` must not be negative: {value}")
    if not values["path"]:
        raise UsageError("task `rows` needs a data set in `task.options.path`")
    return values


def _resolved(text: str) -> Path:
    try:
        path = Path(text).expanduser().resolve()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, an unknown user, a name no file can have
        raise UsageError(f"task `rows`: no path ({error}): {text[:200]!r}") from None
    return path


def _read(path: str, values: Mapping[str, Any], data_dir: Path) -> list[Sample]:
    if not path:
        return []
    source = _resolved(path)
    root = _resolved(values["media_root"]) if values["media_root"] else None
    media = MediaFiles(
        root or (source if source.is_dir() else source.parent),
        data_dir / "media",
        allow_remote=values["allow_remote_media"],
    )
    text = TextOptions(system=values["system"], instruction=values["instruction"], default_kind=values["default_kind"])
    found: list[Sample] = []
    for name, row in read_rows(source, values["split"]):
        if values["max_rows"] and len(found) == values["max_rows"]:
            break
        found.append(to_sample(row, name, media, text))
    if not found:
        raise UsageError(f"task `rows`: no rows in: {source}")
    return found
