"""A tiny random Qwen2.5-VL and prompts for it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollplex_cli.data.compat import ensure_torchvision
from rollplex_cli.data.types import Media, Prompt, Sample
from rollplex_cli.engines.inputs import PromptInput

VIDEO, IMAGE, VISION_START, VISION_END, END = 380, 381, 382, 383, 384
VOCAB = 448


def tiny_config(
    *, tied: bool = True, intermediate: int = 192, window: int = 112, layers: int = 2, kv_heads: int = 2
) -> Any:
    """The demo's architecture; `window` and `intermediate` vary what the layout code has to handle."""
    from transformers import Qwen2_5_VLConfig

    text = {
        "hidden_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 384,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "initializer_range": 0.08,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": None,
    }
    vision = {
        "hidden_size": 64,
        "depth": 2,
        "num_heads": 4,
        "intermediate_size": intermediate,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": window,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
        "out_hidden_size": 128,
        "initializer_range": 0.08,
    }
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        video_token_id=VIDEO,
        image_token_id=IMAGE,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=tied,
    )


def tiny_model(dtype: torch.dtype = torch.float32, *, seed: int = 0, **options: Any) -> Any:
    """Random weights; biases and norms are moved off their trivial initial values too."""
    ensure_torchvision()
    from transformers import Qwen2_5_VLForConditionalGeneration

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2_5_VLForConditionalGeneration(tiny_config(**options))
        with torch.no_grad():
            for param in model.parameters():
                if param.dim() == 1:
                    param.add_(torch.randn(param.shape) * 0.1)
    return model.to(dtype).eval()


def make_prompt(seed: int, grids: list[tuple[int, int, int]], *, words: int = 12, seconds: float = 1.0) -> PromptInput:
    """A prompt of random words around random media. Text after a medium continues at its largest position + 1."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    columns: list[torch.Tensor] = []
    spans, media, following = [], [], 0

    def text(ids: list[int]) -> None:
        nonlocal following
        tokens.extend(ids)
        columns.append((torch.arange(len(ids)) + following).expand(3, -1))
        following += len(ids)

    text([rng.randrange(VIDEO) for _ in range(words // 3)])
    for t, h, w in grids:
        text([VISION_START])
        merged = (t, h // 2, w // 2)
        axes = torch.meshgrid(*(torch.arange(n) for n in merged), indexing="ij")
        grid = torch.stack([(axes[0] * seconds * 2).long(), axes[1], axes[2]]).reshape(3, -1) + following
        spans.append((len(tokens), len(tokens) + grid.shape[1] - 1))
        tokens.extend([VIDEO] * grid.shape[1])
        columns.append(grid)
        following = int(grid.max()) + 1
        patches = torch.randn(t * h * w, 1176, generator=generator)
        media.append(
            Media(kind="video", patches=patches, grid_thw=(t, h, w), seconds_per_grid=seconds, content_hash=seed)
        )
        text([VISION_END])
    text([rng.randrange(VIDEO) for _ in range(words - words // 3)])
    sample = Sample(sample_id=str(seed), question="", answer="", kind="")
    return PromptInput(
        prompt=Prompt(sample=sample, token_ids=tuple(tokens), media=tuple(media)),
        position_ids=torch.cat(columns, dim=1).contiguous(),
        rope_delta=following - len(tokens),
        media_spans=tuple(spans),
    )


def make_responses(seed: int, lengths: list[int]) -> list[list[int]]:
    """Random responses of these lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(VIDEO) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """The builders above: `tiny.model(dtype, ...)`, `tiny.prompt(seed, grids)`, `tiny.responses(seed, lengths)`."""
    return SimpleNamespace(
        config=tiny_config,
        model=tiny_model,
        prompt=make_prompt,
        responses=make_responses,
        banned=(VIDEO, IMAGE),
    )


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
