"""Building the rollout engine of a rank; also what a preparation needs, without trainer and DeepSpeed."""

from __future__ import annotations

import contextlib
import json
import os
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch.distributed as dist

from rollplex_cli.core.seeds import derive_seed
from rollplex_cli.engines.inputs import MediaTokens
from rollplex_cli.engines.lora.adapters import LoraSettings
from rollplex_cli.engines.rollout.args import RolloutOptions
from rollplex_cli.engines.rollout.engine import SglangRollout
from rollplex_cli.runtime.assembly.build_memory import place_key_values, place_weights
from rollplex_cli.runtime.assembly.devices import backend_of, device_of, rollout_stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rollplex_cli.engines.rollout.base import RolloutEngine
    from rollplex_cli.memory.residency import Residency
    from rollplex_cli.profile.schema import Profile


def media_tokens_of(model_dir: Path) -> MediaTokens:
    """Placeholder ids and grid sizes of a checkpoint folder."""
    return MediaTokens.from_config(json.loads((model_dir / "config.json").read_text(encoding="utf-8")))


def lora_settings(profile: Profile) -> LoraSettings | None:
    """The adapters that a profile asks for."""
    lora = profile.lora
    return None if lora is None else LoraSettings(rank=lora.rank, alpha=lora.alpha, targets=lora.targets)


def build_rollout(
    profile: Profile,
    model_dir: Path,
    *,
    replicas: tuple[tuple[int, ...], ...] | None = None,
    weights: Literal["from_checkpoint", "from_trainer"] = "from_checkpoint",
    residency: Residency | None = None,
    foreign: Mapping[str, Sequence[tuple[int, int]]] | None = None,
) -> RolloutEngine:
    """The rollout engine of this rank. Call it on the thread that will own it; every rank at the same point.

    Args:
        replicas: global ranks of every rollout replica; None makes every rank its own.
        weights: `from_trainer` leaves them to be written by whoever builds the trainer, the adapters among them; from
            a checkpoint there are no adapters.
        residency: places weights and KV pool, which is without memory until its next lease; None leaves them to the
            engine.
        foreign: rows of the weights that other ranks train, see `place_weights`.
    """
    device = device_of(profile)
    engine = SglangRollout(
        RolloutOptions(
            model_dir=model_dir,
            replicas=replicas,
            load_weights=weights == "from_checkpoint",
            device=device,
            gpu_index=int(os.environ.get("LOCAL_RANK", "0")),
            dtype=profile.model.dtype,
            kv_tokens=profile.rollout.kv_tokens,
            max_running_requests=profile.rollout.max_running_requests,
            chunked_prefill_tokens=profile.rollout.chunked_prefill_tokens,
            seed=derive_seed(profile.runtime.seed, "engine"),
            stream=rollout_stream() if device == "cuda" else None,
            rebind=None if residency is None else partial(place_weights, residency, foreign or {}),
            kv_buffers=None if residency is None else partial(place_key_values, residency),
            run_ahead=profile.rollout.run_ahead and device == "cuda",
            lora=lora_settings(profile) if weights == "from_trainer" else None,
        )
    )
    if residency is not None:
        residency.rest("rollout_kv")
    return engine


@contextlib.contextmanager
def open_single_rank(device: Literal["cpu", "cuda"]) -> Iterator[None]:
    """A process group of one rank, for work before the run."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend_of(device), store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
