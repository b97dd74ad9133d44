"""A tiny random model of every family, and prompts with images and videos for it."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rollplex_cli.data.compat import ensure_torchvision
from rollplex_cli.data.types import Media, Prompt, Sample
from rollplex_cli.engines.inputs import MediaTokens, PromptInput, build_prompt_input
from rollplex_cli.plan.families import FAMILIES

if TYPE_CHECKING:
    from pathlib import Path

VIDEO, IMAGE, VISION_START, VISION_END, END = 380, 381, 382, 383, 384
VOCAB = 448
BANNED = (VIDEO, IMAGE)
Grid = tuple[int, int, int]


def text_values(family: str, tied: bool, layers: int, kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 384,
        "vocab_size": VOCAB,
        # Not the tower's 1e-6: an engine that took it for the tower's norms too would be found out.
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "initializer_range": 0.08,
        "tie_word_embeddings": tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
        | ROPE.get(family, {}),
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": None,
    } | TEXT.get(family, {})


VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 64, "hidden_size": 128, "mlp_ratio": 3, "depth": 2, "num_heads": 4},
    "qwen2_5_vl": {
        "hidden_size": 64, "intermediate_size": 190, "out_hidden_size": 128, "depth": 2, "num_heads": 4,
        "window_size": 56, "fullatt_block_indexes": [1], "tokens_per_second": 2,
    },
    # Fewer table cells than the rollout engine pads to, and more rows of patches than of cells.
    "qwen3_vl": {
        "hidden_size": 64, "intermediate_size": 196, "out_hidden_size": 128, "depth": 3, "num_heads": 4,
        "patch_size": 16, "num_position_embeddings": 49, "deepstack_visual_indexes": [0, 1],
    },
}  # fmt: skip
TEXT: dict[str, dict[str, Any]] = {"qwen3_vl": {"head_dim": 48}}
ROPE: dict[str, dict[str, Any]] = {"qwen3_vl": {"mrope_section": [10, 7, 7], "mrope_interleaved": True}}


def config_of(family: str, *, tied: bool = True, layers: int = 3, kv_heads: int = 2) -> Any:
    """The smallest configuration with everything that sets the family apart."""
    ensure_torchvision()
    import transformers

    return getattr(transformers, FAMILIES[family].config_class)(
        text_config=text_values(family, tied, layers, kv_heads),
        vision_config=VISION[family] | {"initializer_range": 0.08},
        video_token_id=VIDEO,
        image_token_id=IMAGE,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=tied,
    )


def model_of(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """Random weights; biases and norms are moved off their trivial initial values too."""
    ensure_torchvision()
    import transformers

    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = getattr(transformers, FAMILIES[family].model_class)(config_of(family, **options))
        with torch.no_grad():
            for param in model.parameters():
                if param.dim() == 1:
                    param.add_(torch.randn(param.shape) * 0.1)
                else:
                    param.normal_(0.0, 0.08)
    return model.to(dtype).eval()


def medium(seed: int, kind: Any, grid: Grid, seconds: float, patch_size: int) -> Media:
    """Random patches."""
    generator = torch.Generator().manual_seed(seed)
    patches = torch.randn(grid[0] * grid[1] * grid[2], 3 * 2 * patch_size**2, generator=generator)
    seconds = seconds if kind == "video" else 0.0
    return Media(kind=kind, patches=patches, grid_thw=grid, seconds_per_grid=seconds, content_hash=seed * 7919)


def prompt_of(
    family: str,
    seed: int,
    images: list[tuple[int, int]],
    videos: list[Grid],
    *,
    words: int = 12,
    seconds: float = 0.75,
    still: bool = False,
) -> PromptInput:
    """Random words around images (rows, columns) and videos, as the family lays them out; steps of a `still` video
    are equal where each is a medium of its own."""
    tokens = MediaTokens.from_config(config_of(family).to_dict())
    rng = random.Random(seed)
    ids = [rng.randrange(VIDEO) for _ in range(words // 3)]
    pieces: list[tuple[Any, Grid]] = [("image", (1, *size)) for size in images]
    for steps, rows, columns in videos:
        apart = FAMILIES[family].video_time == "text"
        pieces += [("video", (1, rows, columns))] * steps if apart else [("video", (steps, rows, columns))]
    media = []
    for index, (kind, grid) in enumerate(pieces):
        if kind == "video" and FAMILIES[family].video_time == "text":
            ids += [rng.randrange(VIDEO) for _ in range(3)]  # where a time stamp would be
        media.append(medium(100 * seed + (0 if still else index), kind, grid, seconds, tokens.patch_size))
        count = grid[0] * grid[1] * grid[2] // tokens.merge_size**2
        ids += [VISION_START, *[VIDEO if kind == "video" else IMAGE] * count, VISION_END]
    ids += [rng.randrange(VIDEO) for _ in range(words - words // 3)]
    sample = Sample(sample_id=str(seed), question="", answer="", kind="")
    return build_prompt_input(Prompt(sample=sample, token_ids=tuple(ids), media=tuple(media)), tokens)


def responses_of(seed: int, lengths: list[int]) -> list[list[int]]:
    """Random responses of these lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(VIDEO) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="session")
def kit() -> SimpleNamespace:
    """The builders above, because test modules cannot import one another."""
    return SimpleNamespace(config=config_of, model=model_of, prompt=prompt_of, responses=responses_of, banned=BANNED)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved tiny model of every family."""
    folders = {}
    for family in FAMILIES:
        folders[family] = tmp_path_factory.mktemp(family) / "model"
        model = model_of(family)
        model.generation_config.eos_token_id = END
        model.save_pretrained(folders[family])
    return folders


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
