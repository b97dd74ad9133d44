"""Questions about clips of moving shapes, answered as `<answer>left</answer>`."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from rollplex_cli.core.errors import UsageError
from rollplex_cli.data.types import MediaRef, Sample
from rollplex_cli.data.video import write_video
from rollplex_cli.rl.rewards import exact_answer_parts

from . import checkpoint, clips

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

OPTIONS = {"num_train_clips": 512, "num_validation_clips": 48, "num_eval_clips": 96, "num_kinds": 2}
"""Options of the task with their defaults; `num_kinds` is 1 to 3 (direction, colour, count)."""
SPLITS = {"train": "num_train_clips", "validation": "num_validation_clips", "heldout": "num_eval_clips"}
"""Split to the option with its number of clips. `validation` ends the cold start, `heldout` decides nothing."""

_MANIFEST = "dataset.json"
_VERSION = 1
_THREADS = 4


def prepare(data_dir: Path, options: Mapping[str, Any], seed: int) -> None:
    """Render every clip to `data_dir`/SPLIT/NUMBER.mp4 and write `data_dir`/SPLIT.jsonl.

    Equal options and seed give equal files. A folder that was finished with the same ones is left alone.

    Raises:
        UsageError: an unknown option or a value out of range.
    """
    values = _options(options)
    manifest = {"version": _VERSION, "seed": seed, "options": values}
    if _finished(data_dir) == manifest:
        return
    (data_dir / _MANIFEST).unlink(missing_ok=True)
    for number, (split, option) in enumerate(SPLITS.items()):
        _write_split(data_dir, split, values[option], values["num_kinds"], [seed, number])
    # Last, so that an interrupted run is not taken for a finished one.
    (data_dir / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def samples(data_dir: Path, split: str) -> list[Sample]:
    """Rows of a split (`train`, `validation`, `heldout`) of a prepared folder.

    Raises:
        UsageError: no such split, or the folder was never prepared.
    """
    if split not in SPLITS:
        raise UsageError(f"no such split, known are {', '.join(SPLITS)}: {split}")
    if _finished(data_dir) is None:
        raise UsageError(f"no prepared data in: {data_dir}")
    lines = (data_dir / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [_sample(data_dir, json.loads(line)) for line in lines]


def reward(sample: Sample, text: str, finished: bool) -> dict[str, float]:
    """0.9 for the right answer plus 0.1 for the form; `finished` says that the response ended by itself."""
    return exact_answer_parts(text, sample.answer, finished)


def answer_text(sample: Sample) -> str:
    """The response that earns the whole reward, without the end token."""
    return f"<answer>{sample.answer}</answer>"


def build_base(base_dir: Path, data_dir: Path, config_json: Path, seed: int) -> None:
    """Write tokenizer, processors and random weights of the sizes in `config_json` to `base_dir`.

    `data_dir` is not read: the tokenizer knows every question the task can ask, whatever its options.
    """
    del data_dir
    checkpoint.build_checkpoint(base_dir, config_json, seed)


def build_shell(base_dir: Path, data_dir: Path, config_json: Path) -> None:
    """As `build_base`, but without weights: whoever loads the folder draws them."""
    del data_dir
    checkpoint.build_checkpoint(base_dir, config_json, None)


def _options(options: Mapping[str, Any]) -> dict[str, int]:
    unknown = sorted(set(options) - set(OPTIONS))
    if unknown:
        raise UsageError(f"task `shapes` has no option: {unknown[0]}", hint=f"options are {', '.join(OPTIONS)}")
    values = OPTIONS | dict(options)
    for name, value in values.items():
        top = len(clips.KINDS) if name == "num_kinds" else None
        if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (top and value > top):
            limits = f"from 1 to {top}" if top else "of at least 1"
            raise UsageError(f"task `shapes`: `{name}` must be a whole number {limits}: {value}")
    return values


def _finished(data_dir: Path) -> dict[str, Any] | None:
    path = data_dir / _MANIFEST
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def _write_split(data_dir: Path, split: str, number: int, num_kinds: int, seed: list[int]) -> None:
    folder = data_dir / split
    folder.mkdir(parents=True, exist_ok=True)
    scenes = [_scene(index, num_kinds, seed) for index in range(number)]

    def write(index: int) -> None:
        write_video(folder / f"{index:05d}.mp4", clips.render(scenes[index]), clips.FPS)

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(write, range(number)))
    rows = [_row(split, index, scene) for index, scene in enumerate(scenes)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (data_dir / f"{split}.jsonl").write_text(text, encoding="utf-8")


def _scene(index: int, num_kinds: int, seed: list[int]) -> clips.Scene:
    """Kinds take turns, and so do the answers of a kind: every split is balanced."""
    kind = clips.KINDS[index % num_kinds]
    answers = clips.ANSWERS[kind]
    generator = np.random.default_rng([*seed, index])
    return clips.make_scene(kind, answers[index // num_kinds % len(answers)], generator)


def _row(split: str, index: int, scene: clips.Scene) -> dict[str, Any]:
    return {
        "sample_id": f"{split}-{index:05d}",
        "video": f"{split}/{index:05d}.mp4",
        "question": scene.question,
        "answer": scene.answer,
        "kind": scene.kind,
    }


def _sample(data_dir: Path, row: Mapping[str, str]) -> Sample:
    return Sample(
        sample_id=row["sample_id"],
        question=row["question"],
        answer=row["answer"],
        kind=row["kind"],
        media=(MediaRef(kind="video", path=data_dir / row["video"]),),
    )
