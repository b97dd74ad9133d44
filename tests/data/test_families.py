"""Prompts of the families whose processors differ from Qwen2.5-VL's, against those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollplex_cli.core.resources import model_config_folder
from rollplex_cli.data.processor import PromptBuilder
from rollplex_cli.data.tasks import Task
from rollplex_cli.data.types import MediaRef, Prompt, Sample
from rollplex_cli.data.video import read_video, write_video
from rollplex_cli.engines.inputs import MediaTokens, build_prompt_input
from rollplex_cli.profile.schema import DataProfile

QUESTION = "Which way does the red square move?"


@pytest.fixture(scope="session")
def shells(shapes: Task, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoint folders without weights."""
    folders = {}
    for name in ("tiny-qwen2vl", "tiny-qwen3vl"):
        config = model_config_folder(name)
        assert config is not None
        folders[name] = tmp_path_factory.mktemp(name) / "base"
        shapes.build_shell(folders[name], data_dir, config / "config.json")
    return folders


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """Noise of 2.5 s at 12 frames per second."""
    path = tmp_path / "clip.mp4"
    write_video(path, np.random.default_rng(1).integers(0, 255, (30, 96, 128, 3), dtype=np.uint8), 12)
    return path


def prompt_of(folder: Path, profile: DataProfile, *paths: Path) -> Prompt:
    media = tuple(MediaRef(kind="video", path=path) for path in paths)
    sample = Sample(sample_id="0", question=QUESTION, answer="left", kind="", media=media)
    return PromptBuilder(folder, profile).build(sample)


def theirs(folder: Path, clip: Path, size: dict[str, int]) -> Any:
    """The same prompt from the processor of transformers; frames are chosen by ours."""
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    frames = read_video(clip, fps=2.0, max_frames=8)
    message = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": QUESTION}]}
    indices = [round(12 * seconds) for seconds in frames.timestamps]
    return processor(
        text=[processor.apply_chat_template([message], add_generation_prompt=True)],
        videos=[torch.from_numpy(frames.frames).movedim(-1, -3)],
        video_metadata=[{"fps": 12, "total_num_frames": 30, "duration": 2.5, "frames_indices": indices}],
        do_sample_frames=False,
        size=size,
        return_tensors="pt",
    )


def test_qwen2_vl_is_given_what_transformers_gives_it(
    shells: dict[str, Path], data_profile: DataProfile, clip: Path
) -> None:
    folder = shells["tiny-qwen2vl"]
    prompt = prompt_of(folder, data_profile, clip)
    size = {"shortest_edge": data_profile.min_pixels, "longest_edge": data_profile.max_pixels}
    expected = theirs(folder, clip, size)
    assert expected["input_ids"][0].tolist() == list(prompt.token_ids)
    assert torch.equal(expected["pixel_values_videos"], prompt.media[0].patches)
    assert expected["video_grid_thw"].tolist() == [list(prompt.media[0].grid_thw)]


def test_qwen3_vl_reads_the_time_before_every_step(
    shells: dict[str, Path], data_profile: DataProfile, clip: Path
) -> None:
    folder = shells["tiny-qwen3vl"]
    prompt = prompt_of(folder, data_profile, clip)
    frames = read_video(clip, fps=2.0, max_frames=8).timestamps
    limits = (data_profile.min_pixels, data_profile.max_pixels)
    # That processor counts the pixels of all frames.
    size = dict(zip(("shortest_edge", "longest_edge"), (len(frames) * n for n in limits), strict=True))
    expected = theirs(folder, clip, size)
    config = MediaTokens.from_config(_config(folder))
    ids = expected["input_ids"][0].tolist()
    # Since 5.12 the outer marks around a whole video stay; the model was trained without them.
    start = ids.index(config.vision_start_token_id)
    end = len(ids) - 1 - ids[::-1].index(config.vision_start_token_id + 1)
    assert ids[end - 1] == config.vision_start_token_id + 1, "two marks in a row at the end of the video"
    assert [*ids[:start], *ids[start + 1 : end], *ids[end + 1 :]] == list(prompt.token_ids)
    assert torch.equal(expected["pixel_values_videos"], torch.cat([m.patches for m in prompt.media]))
    ((steps, rows, columns),) = expected["video_grid_thw"].tolist()
    assert [m.grid_thw for m in prompt.media] == [(1, rows, columns)] * steps
    assert len({m.content_hash for m in prompt.media}) == steps
    tokenizer = PromptBuilder(folder, data_profile)._tokenizer
    middle = (frames[2] + frames[3]) / 2
    assert f"<{middle:.1f} seconds><|vision_start|><|video_pad|>" in tokenizer.decode(list(prompt.token_ids))


def test_positions_of_qwen3_vl_are_those_of_transformers(
    shells: dict[str, Path], data_profile: DataProfile, clip: Path
) -> None:
    import transformers

    folder = shells["tiny-qwen3vl"]
    prompt = prompt_of(folder, data_profile, clip, clip)
    tokens = MediaTokens.from_config(_config(folder))
    ours = build_prompt_input(prompt, tokens)
    with torch.device("meta"):
        model = transformers.Qwen3VLForConditionalGeneration(transformers.Qwen3VLConfig.from_pretrained(folder))
    ids = torch.tensor([prompt.token_ids])
    positions, delta = model.model.get_rope_index(
        ids,
        mm_token_type_ids=2 * (ids == tokens.video_token_id).int(),
        video_grid_thw=torch.tensor([m.grid_thw for m in prompt.media]),
    )
    assert torch.equal(ours.position_ids, positions[:, 0])
    assert ours.rope_delta == int(delta)


def _config(folder: Path) -> dict[str, Any]:
    import json

    values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return values
