"""Prompts from worker processes: the same as in this one, in any order, and no fault costs more than a row."""

from __future__ import annotations

import dataclasses
import random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from PIL import Image

from rollplex_cli.core.errors import DataError
from rollplex_cli.data.decode import ProcessBuilder
from rollplex_cli.data.loader import PromptLoader
from rollplex_cli.data.order import BatchOrder
from rollplex_cli.data.processor import PromptBuilder
from rollplex_cli.data.types import MediaRef, Message, Sample

if TYPE_CHECKING:
    from pathlib import Path

    from rollplex_cli.data.tasks import Task
    from rollplex_cli.data.types import Prompt
    from rollplex_cli.profile.schema import DataProfile


@pytest.fixture(scope="module")
def mixed(shapes: Task, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Sample]:
    """Text, image, video, and several of them in one prompt, in turn."""
    folder = tmp_path_factory.mktemp("mixed")
    found = []
    for index, sample in enumerate(shapes.samples(data_dir, "train")[:8]):
        picture = folder / f"{index}.png"
        pixels = np.random.default_rng(index).integers(0, 255, (40 + 8 * index, 60, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(picture)
        image = MediaRef(kind="image", path=picture)
        media = [(), (image,), sample.media, (image, *sample.media)][index % 4]
        messages = ()
        if len(media) == 2:
            messages = (
                Message(role="system", content=("Be brief.",)),
                Message(role="user", content=("First ", media[0], " then ", media[1], sample.question)),
            )
        found.append(dataclasses.replace(sample, media=media, messages=messages))
    return found


def same(one: Prompt, other: Prompt) -> bool:
    return (
        one.sample == other.sample
        and one.token_ids == other.token_ids
        and all(a.content_hash == b.content_hash for a, b in zip(one.media, other.media, strict=True))
        and all(torch.equal(a.patches, b.patches) for a, b in zip(one.media, other.media, strict=True))
    )


def test_messages_keep_text_and_media_in_their_places(builder: PromptBuilder, mixed: list[Sample]) -> None:
    text = builder.decode_response(builder.build(mixed[3]).token_ids)
    assert text == f"system\nBe brief.\nuser\nFirst  then {mixed[3].question}\nassistant\n"


@pytest.mark.scenario
def test_a_prompt_depends_on_its_row_alone(
    base_dir: Path, data_profile: DataProfile, builder: PromptBuilder, mixed: list[Sample]
) -> None:
    """Whatever workers there are, whatever stands beside it in the batch, and from whichever step a run goes on."""
    expected = {sample.sample_id: builder.build(sample) for sample in mixed}
    processes = ProcessBuilder(base_dir, data_profile, 2)
    shuffled = random.Random(1).sample(mixed, len(mixed))
    try:
        for rows, build, num_workers in (
            (mixed, processes, 2),
            (shuffled, processes, 2),
            (mixed, builder, 0),
            (shuffled, builder, 3),
        ):
            order = BatchOrder(len(rows), seed=2, prompts_per_step=4)
            with PromptLoader(rows, build, order, num_workers=num_workers) as loader:
                for step in (0, 1, 3):
                    batch = loader.batch(step)
                    assert [p.sample for p in batch] == [rows[i] for i in order.batch(step)]
                    assert all(same(p, expected[p.sample.sample_id]) for p in batch)
    finally:
        processes.close()


@pytest.mark.scenario
def test_faults_of_rows_and_decoders(
    base_dir: Path, data_profile: DataProfile, mixed: list[Sample], tmp_path: Path
) -> None:
    slow = dataclasses.replace(data_profile, decode_timeout_s=0.0001)
    gone = dataclasses.replace(mixed[0], media=(MediaRef(kind="video", path=tmp_path / "none.mp4"),))
    processes, hurried = ProcessBuilder(base_dir, data_profile, 1), ProcessBuilder(base_dir, slow, 1)
    try:
        with pytest.raises(DataError, match=rf"sample `{gone.sample_id}`: no such video"):
            processes.build(gone)
        assert processes.build(mixed[1]).media[0].kind == "image"
        with pytest.raises(DataError, match=r"not decoded within `data\.decode_timeout_s`: 0\.0001 s"):
            hurried.build(mixed[2])
    finally:
        processes.close()
        hurried.close()


def test_limits_on_the_pixels_of_a_whole_video(base_dir: Path, data_profile: DataProfile, mixed: list[Sample]) -> None:
    """8 frames may have 25088 * 2 / 8 = 6272 pixels each: 79x79, so 56x56, or 4 patches a side instead of 8."""
    small = PromptBuilder(base_dir, dataclasses.replace(data_profile, total_pixels=25088))
    assert small.build(mixed[2]).media[0].grid_thw == (4, 4, 4)


def test_transparent_pictures_lie_on_white(builder: PromptBuilder, mixed: list[Sample], tmp_path: Path) -> None:
    media = []
    for name, mode, colour in (("clear", "RGBA", (200, 0, 0, 0)), ("white", "RGB", (255, 255, 255))):
        Image.new(mode, (56, 56), colour).save(tmp_path / f"{name}.png")
        reference = MediaRef(kind="image", path=tmp_path / f"{name}.png")
        media.append(builder.build(dataclasses.replace(mixed[0], media=(reference,))).media[0])
    assert torch.equal(media[0].patches, media[1].patches)
