"""Prompts as the model sees them, with the real tokenizer and the real Qwen processors."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rollplex_cli.core.errors import DataError, UsageError
from rollplex_cli.data.processor import PromptBuilder
from rollplex_cli.data.tasks import Task
from rollplex_cli.data.types import MediaRef, Prompt, Sample
from rollplex_cli.data.video import read_video, write_video
from rollplex_cli.engines.inputs import MediaTokens, build_prompt_input
from rollplex_cli.profile.schema import DataProfile


@pytest.fixture(scope="session")
def media_tokens(base_dir: Path) -> MediaTokens:
    return MediaTokens.from_config(json.loads((base_dir / "config.json").read_text(encoding="utf-8")))


@pytest.fixture
def sample(shapes: Task, data_dir: Path) -> Sample:
    return shapes.samples(data_dir, "train")[0]


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    pixels = np.random.default_rng(0).integers(0, 255, size=(50, 84, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def with_media(sample: Sample, *media: MediaRef) -> Sample:
    return dataclasses.replace(sample, media=media)


def count(prompt: Prompt, token: int) -> int:
    return sum(t == token for t in prompt.token_ids)


def test_video_prompt(builder: PromptBuilder, sample: Sample, media_tokens: MediaTokens) -> None:
    prompt = builder.build(sample)
    (medium,) = prompt.media
    # 8 frames of 112x112: 4 steps of 8x8 patches, 4 patches per token; 28 tokens of text.
    assert medium.grid_thw == (4, 8, 8)
    assert medium.patches.shape == (256, 3 * 2 * 14 * 14)
    assert medium.patches.dtype == torch.float32
    assert medium.seconds_per_grid == pytest.approx(1.0)
    assert count(prompt, media_tokens.video_token_id) == 64
    assert len(prompt.token_ids) == 64 + 28


def test_the_processor_of_transformers_gives_the_same(builder: PromptBuilder, sample: Sample, base_dir: Path) -> None:
    from transformers import AutoProcessor

    processor = AutoProcessor.from_pretrained(base_dir)
    clip = read_video(sample.media[0].path, fps=2.0, max_frames=8)
    message = {"role": "user", "content": [{"type": "video"}, {"type": "text", "text": sample.question}]}
    theirs = processor(
        text=[processor.apply_chat_template([message], add_generation_prompt=True)],
        videos=[torch.from_numpy(clip.frames).movedim(-1, -3)],
        video_metadata=[{"fps": 2, "total_num_frames": 8, "duration": 4, "frames_indices": list(range(8))}],
        do_sample_frames=False,
        return_tensors="pt",
    )
    prompt = builder.build(sample)
    assert theirs["input_ids"][0].tolist() == list(prompt.token_ids)
    assert torch.equal(theirs["pixel_values_videos"], prompt.media[0].patches)
    assert theirs["video_grid_thw"].tolist() == [list(prompt.media[0].grid_thw)]
    assert theirs["second_per_grid_ts"] == pytest.approx([prompt.media[0].seconds_per_grid])


def test_text_only(builder: PromptBuilder, sample: Sample, media_tokens: MediaTokens) -> None:
    prompt = builder.build(with_media(sample))
    assert prompt.media == ()
    assert len(prompt.token_ids) == 28 - 2
    assert build_prompt_input(prompt, media_tokens).rope_delta == 0


def test_image(builder: PromptBuilder, sample: Sample, picture: Path, media_tokens: MediaTokens) -> None:
    prompt = builder.build(with_media(sample, MediaRef(kind="image", path=picture)))
    (medium,) = prompt.media
    assert medium.grid_thw == (1, 4, 6)  # 50x84 px to 56x84
    assert medium.seconds_per_grid == 0.0
    assert count(prompt, media_tokens.image_token_id) == 6
    assert build_prompt_input(prompt, media_tokens).media_spans == ((4, 9),)


def test_several_media_of_different_sizes_and_rates(
    builder: PromptBuilder, sample: Sample, picture: Path, tmp_path: Path, media_tokens: MediaTokens
) -> None:
    wide = tmp_path / "wide.mp4"
    write_video(wide, np.zeros((6, 56, 140, 3), dtype=np.uint8), 1)
    image = MediaRef(kind="image", path=picture)
    prompt = builder.build(with_media(sample, *sample.media, image, MediaRef(kind="video", path=wide)))
    assert [medium.kind for medium in prompt.media] == ["video", "image", "video"]
    assert [medium.grid_thw for medium in prompt.media] == [(4, 8, 8), (1, 4, 6), (3, 4, 10)]
    assert [medium.seconds_per_grid for medium in prompt.media] == pytest.approx([1.0, 0.0, 2.0])
    given = build_prompt_input(prompt, media_tokens)
    assert given.media_spans == ((4, 67), (70, 75), (78, 107))
    assert given.position_ids.shape == (3, given.num_tokens)


def test_six_frames_per_second(
    base_dir: Path, data_profile: DataProfile, sample: Sample, tmp_path: Path, media_tokens: MediaTokens
) -> None:
    path = tmp_path / "fast.mp4"
    write_video(path, np.zeros((24, 56, 56, 3), dtype=np.uint8), 12)
    builder = PromptBuilder(base_dir, dataclasses.replace(data_profile, fps=6.0, max_frames=64))
    prompt = builder.build(with_media(sample, MediaRef(kind="video", path=path)))
    assert prompt.media[0].seconds_per_grid == pytest.approx(1 / 3)
    times = build_prompt_input(prompt, media_tokens).position_ids[0]
    assert times[4 : 4 + 6 * 4 : 4].tolist() == [4, 4, 5, 6, 6, 7]


def test_large_frames_are_resized_to_the_limit(builder: PromptBuilder, sample: Sample, tmp_path: Path) -> None:
    path = tmp_path / "large.mp4"
    write_video(path, np.zeros((4, 240, 320, 3), dtype=np.uint8), 2)
    (medium,) = builder.build(with_media(sample, MediaRef(kind="video", path=path))).media
    assert medium.grid_thw == (2, 6, 8)  # 84x112 px, at most 12544 pixels


def test_the_hash_is_of_the_content(builder: PromptBuilder, shapes: Task, data_dir: Path, tmp_path: Path) -> None:
    first, second = shapes.samples(data_dir, "train")[:2]
    again = tmp_path / "copy.mp4"
    again.write_bytes(first.media[0].path.read_bytes())
    copy = with_media(first, MediaRef(kind="video", path=again))
    hashes = [builder.build(s).media[0].content_hash for s in (first, second, copy)]
    assert hashes[0] == hashes[2] != hashes[1]
    assert all(0 <= h < 2**62 for h in hashes)


def test_the_hash_knows_the_rate(builder: PromptBuilder, sample: Sample, tmp_path: Path) -> None:
    paths = [tmp_path / "slow.mp4", tmp_path / "fast.mp4"]
    for path, fps in zip(paths, (1, 2), strict=True):
        write_video(path, np.full((4, 56, 56, 3), 90, dtype=np.uint8), fps)
    media = [builder.build(with_media(sample, MediaRef(kind="video", path=path))).media[0] for path in paths]
    assert torch.equal(media[0].patches, media[1].patches)
    assert media[0].content_hash != media[1].content_hash


@pytest.mark.parametrize("token", ["<|video_pad|>", "<|im_end|>", "<|vision_start|>"])
def test_special_tokens_in_a_question_are_refused(builder: PromptBuilder, sample: Sample, token: str) -> None:
    odd = dataclasses.replace(sample, question=f"What is {token} here?")
    with pytest.raises(DataError, match=sample.sample_id) as caught:
        builder.build(odd)
    assert token in caught.value.message


def test_special_tokens_anywhere_in_a_long_text_are_refused(builder: PromptBuilder, sample: Sample) -> None:
    for text in ("word " * 10_000 + "<|video_pad|>", "<|video_pad|>" * 10_000):
        with pytest.raises(DataError, match=r"special token: <\|video_pad\|>"):
            builder.build(dataclasses.replace(sample, question=text))
    with pytest.raises(DataError, match="half a character"):
        builder.build(dataclasses.replace(sample, question="a \ud83d b"))


def test_a_clip_longer_than_the_positions_of_the_model(builder: PromptBuilder, sample: Sample, tmp_path: Path) -> None:
    # 2048 positions at 2 a second: 1024 s.
    for seconds, fits in ((200, True), (300, False)):
        path = tmp_path / f"{seconds}.mp4"
        write_video(path, np.zeros((4, 56, 56, 3), dtype=np.uint8), Fraction(1, seconds))
        lapse = with_media(sample, MediaRef(kind="video", path=path))
        if fits:
            assert builder.build(lapse).media[0].seconds_per_grid == pytest.approx(2.0 * seconds)
        else:
            with pytest.raises(DataError, match=r"lasts 1\.2e\+03 s, more than .* 1\.02e\+03 s"):
                builder.build(lapse)


@pytest.mark.parametrize("question", ["<image> Wie weit? 42 km \u2014 \u5de6", "[/answer] <video>", "{{ 1 + 1 }}", ""])
def test_other_text_survives_as_it_is(builder: PromptBuilder, sample: Sample, question: str) -> None:
    prompt = builder.build(dataclasses.replace(sample, question=question, media=()))
    text = builder.decode_response(prompt.token_ids)
    assert text == f"user\n{question}\nassistant\n"


def test_too_long_names_row_and_numbers(base_dir: Path, data_profile: DataProfile, sample: Sample) -> None:
    short = PromptBuilder(base_dir, dataclasses.replace(data_profile, max_prompt_tokens=91))
    with pytest.raises(DataError, match=rf"`{sample.sample_id}`.* 92 tokens.*: 91$") as caught:
        short.build(sample)
    assert caught.value.hint is not None
    exact = PromptBuilder(base_dir, dataclasses.replace(data_profile, max_prompt_tokens=92))
    assert len(exact.build(sample).token_ids) == 92


def test_bad_media_name_the_sample(builder: PromptBuilder, sample: Sample, tmp_path: Path) -> None:
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"\x89PNG not really")
    sliver = tmp_path / "sliver.png"
    Image.new("RGB", (2000, 2)).save(sliver)
    cases = [
        (MediaRef(kind="video", path=tmp_path / "none.mp4"), "no such video"),
        (MediaRef(kind="image", path=tmp_path / "none.png"), "no such image"),
        (MediaRef(kind="image", path=broken), "image cannot be decoded"),
        (MediaRef(kind="image", path=sliver), "aspect ratio"),
    ]
    for reference, message in cases:
        with pytest.raises(DataError, match=rf"sample `{sample.sample_id}`: .*{message}"):
            builder.build(with_media(sample, reference))


def test_responses_round_trip(builder: PromptBuilder, shapes: Task, sample: Sample) -> None:
    text = shapes.answer_text(sample)
    ids = builder.encode_response(text)
    assert len(ids) == 6
    assert ids[-1] == builder.eos_token_id != builder.pad_token_id
    assert builder.decode_response(ids) == text
    # Written out, a special token is text; ids the tokenizer does not know decode to nothing.
    assert builder.eos_token_id not in builder.encode_response("<|im_end|>")[:-1]
    assert builder.decode_response([*ids, 440]) == text


def test_threads_build_what_one_builds(builder: PromptBuilder, shapes: Task, data_dir: Path) -> None:
    samples = shapes.samples(data_dir, "train")

    def both(sample: Sample) -> tuple[Prompt, tuple[int, ...]]:
        return builder.build(sample), builder.encode_response("<|im_end|> left")

    serial = [both(sample) for sample in samples]
    with ThreadPoolExecutor(4) as pool:
        parallel = list(pool.map(both, samples))
    for (one, text_one), (other, text_other) in zip(serial, parallel, strict=True):
        assert one.token_ids == other.token_ids
        assert one.media[0].content_hash == other.media[0].content_hash
        assert text_one == text_other


def test_folders_that_are_no_checkpoint(tmp_path: Path, data_profile: DataProfile) -> None:
    with pytest.raises(UsageError, match="no such checkpoint folder"):
        PromptBuilder(tmp_path / "none", data_profile)
    with pytest.raises(UsageError, match="does not load"):
        PromptBuilder(tmp_path, data_profile)
    with pytest.raises(UsageError, match=r"`data\.max_frames` must be at least 2: 1"):
        PromptBuilder(tmp_path, dataclasses.replace(data_profile, max_frames=1))
