"""Building the rollout engine of a rank; also what a preparation needs, without trainer and DeepSpeed."""

from __future__ import annotations

import contextlib
import json
import os
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from rollplex_cli.core.seeds import derive_seed
from rollplex_cli.engines.inputs import MediaTokens
from rollplex_cli.engines.rollout.args import RolloutOptions
from rollplex_cli.engines.rollout.engine import SglangRollout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from rollplex_cli.engines.rollout.base import RolloutEngine
    from rollplex_cli.profile.schema import Profile


def device_of(profile: Profile) -> Literal["cpu", "cuda"]:
    """The device a profile runs on here; `auto` takes CUDA where a GPU is visible."""
    wanted = profile.topology.device
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def media_tokens_of(model_dir: Path) -> MediaTokens:
    """Placeholder ids and grid sizes of a checkpoint folder."""
    return MediaTokens.from_config(json.loads((model_dir / "config.json").read_text(encoding="utf-8")))


def build_rollout(profile: Profile, model_dir: Path) -> RolloutEngine:
    """The rollout engine of this rank. Call it on the thread that will own it; every rank at the same point."""
    device = device_of(profile)
    stream = torch.cuda.Stream(priority=-1) if device == "cuda" else None
    return SglangRollout(
        RolloutOptions(
            model_dir=model_dir,
            device=device,
            gpu_index=int(os.environ.get("LOCAL_RANK", "0")),
            dtype=profile.model.dtype,
            kv_tokens=profile.rollout.kv_tokens,
            max_running_requests=profile.rollout.max_running_requests,
            chunked_prefill_tokens=profile.rollout.chunked_prefill_tokens,
            seed=derive_seed(profile.runtime.seed, "engine"),
            stream=stream,
        )
    )


@contextlib.contextmanager
def open_single_rank() -> Iterator[None]:
    """A process group of one rank, for work before the run."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        dist.destroy_process_group()
