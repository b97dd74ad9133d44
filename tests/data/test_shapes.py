"""The bundled task: its clips, rows, rewards and first checkpoint."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.resources import model_config_folder
from rollplex_cli.data.tasks import Task
from rollplex_cli.data.video import read_video

COLOURS = {"red": (220, 40, 40), "green": (40, 190, 60), "blue": (50, 80, 230), "yellow": (235, 215, 40)}
SPLITS = ("train", "validation", "heldout")


@pytest.fixture
def clips(shapes: Any) -> ModuleType:
    return sys.modules[shapes.__name__.removesuffix("task") + "clips"]


def test_splits_are_complete_balanced_and_apart(shapes: Task, data_dir: Path) -> None:
    rows = {split: shapes.samples(data_dir, split) for split in SPLITS}
    assert [len(rows[split]) for split in SPLITS] == [9, 8, 4]
    assert Counter(sample.kind for sample in rows["train"]) == {"direction": 3, "colour": 3, "count": 3}
    every = [sample for split in SPLITS for sample in rows[split]]
    assert len({sample.sample_id for sample in every}) == len(every)
    assert len({sample.media[0].path.read_bytes() for sample in every}) == len(every)


def test_equal_seeds_give_equal_files_and_others_do_not(
    shapes: Task, data_dir: Path, shapes_options: dict[str, int], tmp_path: Path
) -> None:
    shapes.prepare(tmp_path / "again", shapes_options, 3)
    shapes.prepare(tmp_path / "other", shapes_options, 4)

    def files(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert files(tmp_path / "again") == files(data_dir)
    other = files(tmp_path / "other")
    assert other.keys() == files(data_dir).keys()
    assert not any(other[name] == data for name, data in files(data_dir).items() if name.endswith(".mp4"))


def test_a_finished_folder_is_left_alone_and_an_unfinished_one_is_not(shapes: Task, tmp_path: Path) -> None:
    options = {"num_train_clips": 1, "num_validation_clips": 1, "num_eval_clips": 1}
    shapes.prepare(tmp_path, options, 0)
    clip = tmp_path / "train" / "00000.mp4"
    written = clip.stat().st_mtime_ns
    shapes.prepare(tmp_path, options, 0)
    assert clip.stat().st_mtime_ns == written
    (tmp_path / "dataset.json").unlink()
    with pytest.raises(UsageError, match="no prepared data"):
        shapes.samples(tmp_path, "train")
    shapes.prepare(tmp_path, options, 0)
    assert clip.stat().st_mtime_ns > written


def test_decoded_clips_show_what_was_drawn(clips: ModuleType, shapes: Any, data_dir: Path) -> None:
    for index, sample in enumerate(shapes.samples(data_dir, "train")):
        drawn = clips.render(shapes._scene(index, 3, [3, 0]))
        decoded = read_video(sample.media[0].path, fps=4.0, max_frames=16).frames
        assert decoded.shape == drawn.shape == (16, 112, 112, 3)
        assert np.abs(decoded.astype(int) - drawn).mean() < 3.0


def test_answers_are_true_of_the_pixels(shapes: Task, data_dir: Path) -> None:
    for split in SPLITS:
        for sample in shapes.samples(data_dir, split):
            frames = read_video(sample.media[0].path, fps=4.0, max_frames=16).frames
            assert answer_from_pixels(sample.kind, frames) == sample.answer, sample.sample_id
            if sample.kind == "direction":
                assert moving(frames) in sample.question


def areas(frames: np.ndarray) -> dict[str, list[tuple[float, float]]]:
    """Centre (row, column) in each frame of every colour that is there."""
    found = {}
    for colour, value in COLOURS.items():
        near = np.abs(frames.astype(int) - np.array(value)).sum(axis=-1) < 60
        if near[0].sum() > 100:
            found[colour] = [tuple(np.argwhere(frame).mean(axis=0)) for frame in near]
    return found


def moving(frames: np.ndarray) -> str:
    moved = {c: np.abs(np.subtract(path[-1], path[0])).sum() for c, path in areas(frames).items()}
    assert sum(distance > 5 for distance in moved.values()) == 1
    return max(moved, key=moved.__getitem__)


def answer_from_pixels(kind: str, frames: np.ndarray) -> str:
    if kind == "count":
        return str(len(areas(frames)))
    if kind == "colour":
        return moving(frames)
    path = areas(frames)[moving(frames)]
    down, right = np.subtract(path[-1], path[0])
    if abs(down) > abs(right):
        return "down" if down > 0 else "up"
    return "right" if right > 0 else "left"


def test_rewards_of_right_wrong_and_unfinished_answers(shapes: Task, data_dir: Path) -> None:
    for sample in shapes.samples(data_dir, "validation"):
        right = shapes.answer_text(sample)
        assert shapes.reward(sample, right, True) == {"exact": 0.9, "format": 0.1}
        assert shapes.reward(sample, right, False) == {"exact": 0.9, "format": 0.0}
        assert shapes.reward(sample, "<answer>none</answer>", True) == {"exact": 0.0, "format": 0.1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_clips": 3}, "has no option: num_clips"),
        ({"num_kinds": 4}, "`num_kinds` must be a whole number from 1 to 3: 4"),
        ({"num_train_clips": 0}, "`num_train_clips` must be a whole number of at least 1: 0"),
        ({"num_eval_clips": 2.5}, "`num_eval_clips`"),
        ({"num_eval_clips": True}, "`num_eval_clips`"),
    ],
)
def test_options_are_checked(shapes: Task, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shapes.prepare(tmp_path, options, 0)


def test_unknown_split(shapes: Task, data_dir: Path) -> None:
    with pytest.raises(UsageError, match="no such split"):
        shapes.samples(data_dir, "test")


def test_checkpoint_loads_and_has_every_file(base_dir: Path) -> None:
    import torch
    from transformers import AutoModelForImageTextToText, AutoProcessor

    names = {path.name for path in base_dir.iterdir()}
    assert names >= {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json",
    }  # fmt: skip
    model = AutoModelForImageTextToText.from_pretrained(base_dir)
    tokenizer = AutoProcessor.from_pretrained(base_dir).tokenizer
    assert type(model).__name__ == "Qwen2_5_VLForConditionalGeneration"
    assert type(tokenizer).__name__ == "Qwen2Tokenizer"
    assert len(tokenizer) <= model.config.text_config.vocab_size
    assert model.config.video_token_id == tokenizer.convert_tokens_to_ids("<|video_pad|>")
    assert model.config.image_token_id == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert model.config.vision_start_token_id == tokenizer.convert_tokens_to_ids("<|vision_start|>")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.text_config.eos_token_id
    assert model.dtype == torch.float32
    # A spread of 0.08 is what lets the tiny model learn; 0.02 stays at chance.
    assert float(model.lm_head.weight.detach().std()) == pytest.approx(0.08, rel=0.05)
    assert float(model.model.visual.blocks[0].mlp.gate_proj.weight.detach().std()) == pytest.approx(0.08, rel=0.05)


def test_checkpoint_is_a_function_of_its_seed(shapes: Task, base_dir: Path, data_dir: Path, tmp_path: Path) -> None:
    config = model_config_folder("tiny")
    assert config is not None
    for name, seed in (("same", 5), ("other", 6)):
        shapes.build_base(tmp_path / name, data_dir, config / "config.json", seed)
    for path in base_dir.iterdir():
        assert path.read_bytes() == (tmp_path / "same" / path.name).read_bytes(), path.name
    weights = "model.safetensors"
    assert (base_dir / weights).read_bytes() != (tmp_path / "other" / weights).read_bytes()
    assert (base_dir / "tokenizer.json").read_bytes() == (tmp_path / "other" / "tokenizer.json").read_bytes()


def test_a_vocabulary_too_small_is_refused(shapes: Task, data_dir: Path, tmp_path: Path) -> None:
    folder = model_config_folder("tiny")
    assert folder is not None
    text = (folder / "config.json").read_text(encoding="utf-8")
    small = tmp_path / "config.json"
    small.write_text(text.replace('"vocab_size": 448', '"vocab_size": 256'), encoding="utf-8")
    with pytest.raises(UsageError, match="more than the model's vocabulary of: 256"):
        shapes.build_base(tmp_path / "base", data_dir, small, 0)
