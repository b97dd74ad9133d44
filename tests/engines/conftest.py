"""A tiny random Qwen2.5-VL and prompts for it, shared by the tests of the engines."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from rollplex_cli.data.compat import ensure_torchvision
from rollplex_cli.data.types import Media, Prompt, Sample
from rollplex_cli.engines.inputs import PromptInput
from rollplex_cli.rl.positions import mrope_positions

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

VOCAB = 448
IMAGE_TOKEN = 381
VIDEO_TOKEN = 382
VISION_START = 383
VISION_END = 384
EOS = 385
MERGE = 2


def tiny_config() -> Any:
    """Configuration of 0.7 M parameters with one windowed and one full vision block."""
    from transformers import Qwen2_5_VLConfig

    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 384,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": EOS,
            "pad_token_id": EOS,
        },
        vision_config={
            "hidden_size": 64,
            "depth": 2,
            "num_heads": 4,
            "intermediate_size": 192,
            "out_hidden_size": 128,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "tokens_per_second": 2,
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=VIDEO_TOKEN,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config and safetensors of a random model, weights large enough to matter."""
    ensure_torchvision()
    from transformers import Qwen2_5_VLForConditionalGeneration

    folder = tmp_path_factory.mktemp("tiny") / "model"
    state = torch.get_rng_state()
    torch.manual_seed(11)
    model = Qwen2_5_VLForConditionalGeneration(tiny_config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.08)
            elif "norm" in name or "ln_q" in name:
                parameter.normal_(1.0, 0.2)
            else:
                parameter.normal_(0.0, 0.1)
    torch.set_rng_state(state)
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def default_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A default process group of one rank, unless another test made one."""
    if dist.is_initialized():
        yield
        return
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Tiny:
    """Makes inputs for the tiny model; a fixture, because test modules cannot import one another."""

    image_token = IMAGE_TOKEN
    video_token = VIDEO_TOKEN
    eos_token = EOS
    vocab = VOCAB

    @staticmethod
    def video(seed: int, grid_thw: tuple[int, int, int], fps: float) -> Media:
        """Random patches of a clip sampled at `fps`, two frames to a temporal step."""
        generator = torch.Generator().manual_seed(seed)
        patches = torch.randn(grid_thw[0] * grid_thw[1] * grid_thw[2], 1176, generator=generator)
        digest = hashlib.blake2b(patches.numpy().tobytes(), digest_size=8).digest()
        return Media(
            kind="video",
            patches=patches,
            grid_thw=grid_thw,
            seconds_per_grid=2.0 / fps,
            content_hash=int.from_bytes(digest, "big") >> 2,
        )

    @staticmethod
    def image(seed: int, grid_thw: tuple[int, int, int]) -> Media:
        """Random patches of a picture."""
        video = Tiny.video(seed, grid_thw, 2.0)
        return dataclasses.replace(video, kind="image", seconds_per_grid=0.0)

    @staticmethod
    def prompt(before: Sequence[int], media: Sequence[Media], after: Sequence[int]) -> PromptInput:
        """`before`, each medium between its marks, `after`; positions from the shared function."""
        ids = list(before)
        for medium in media:
            steps, rows, columns = medium.grid_thw
            token = VIDEO_TOKEN if medium.kind == "video" else IMAGE_TOKEN
            ids += [VISION_START, *[token] * (steps * rows * columns // MERGE**2), VISION_END]
        ids += list(after)
        positions = mrope_positions(
            ids,
            media,
            image_token_id=IMAGE_TOKEN,
            video_token_id=VIDEO_TOKEN,
            vision_start_token_id=VISION_START,
            merge_size=MERGE,
            tokens_per_second=2,
        )
        sample = Sample(sample_id="0", question="q", answer="a", kind="k")
        return PromptInput(
            prompt=Prompt(sample=sample, token_ids=tuple(ids), media=tuple(media)),
            position_ids=positions.position_ids,
            rope_delta=positions.rope_delta,
            media_spans=positions.media_spans,
        )

    @staticmethod
    def text_prompt(seed: int, length: int) -> PromptInput:
        """Random token ids without media."""
        generator = torch.Generator().manual_seed(1000 + seed)
        return Tiny.prompt(torch.randint(0, 380, (length,), generator=generator).tolist(), [], [])

    @staticmethod
    def video_prompt(
        seed: int, grid_thw: tuple[int, int, int] = (4, 8, 8), fps: float = 2.0, tail: int = 16
    ) -> PromptInput:
        """A video between random text; 98 tokens by default."""
        generator = torch.Generator().manual_seed(2000 + seed)
        ids = torch.randint(0, 380, (16 + tail,), generator=generator).tolist()
        return Tiny.prompt(ids[:16], [Tiny.video(seed, grid_thw, fps)], ids[16:])


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    """Inputs for the tiny model."""
    return Tiny
