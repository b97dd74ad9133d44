"""Building the rollout engine of a rank; also what a preparation needs, without trainer and DeepSpeed."""

from __future__ import annotations

import contextlib
import json
import os
from functools import partial
from typing import TYPE_CHECKING, Literal, TypedDict

import torch
import torch.distributed as dist

from rollplex_cli.core.seeds import derive_seed
from rollplex_cli.engines.inputs import MediaTokens
from rollplex_cli.engines.lora.adapters import LoraSettings
from rollplex_cli.engines.rollout.absent import AbsentRollout, join_groups
from rollplex_cli.engines.rollout.args import RolloutOptions
from rollplex_cli.engines.rollout.engine import SglangRollout
from rollplex_cli.engines.weights.load import home_shapes
from rollplex_cli.engines.weights.skeleton import build_shards, load_config
from rollplex_cli.runtime.assembly.build_memory import place_key_values, place_weights
from rollplex_cli.runtime.assembly.devices import backend_of, device_of, rollout_stream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from rollplex_cli.engines.collectives import CollectiveLog
    from rollplex_cli.engines.rollout.base import RolloutEngine
    from rollplex_cli.memory.residency import Residency
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.runtime.team.team import Team


class Degrees(TypedDict):
    """Arguments of `build_shards`."""

    train_tp: int
    training_shard: int
    rollout_tp: int


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
    log: CollectiveLog | None = None,
) -> RolloutEngine:
    """The rollout engine of this rank. Call it on the thread that will own it; every rank at the same point.

    Args:
        replicas: global ranks of every rollout replica; None makes every rank its own.
        weights: `from_trainer` leaves them to be written by whoever builds the trainer, the adapters among them; from
            a checkpoint there are no adapters.
        residency: places weights and KV pool, which is without memory until its next lease; None leaves them to the
            engine.
        foreign: rows of the weights that other ranks train, see `place_weights`.
        log: see `RolloutOptions`.
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
            log=log,
        )
    )
    if residency is not None:
        residency.rest("rollout_kv")
    return engine


def build_absent(profile: Profile, model_dir: Path, team: Team, residency: Residency) -> RolloutEngine:
    """What a rank that only trains has in place of an engine: memory for the weights that it trains. Call it where
    other ranks call `build_rollout`."""
    topology, device = team.topology, device_of(profile)
    join_groups(topology.rollout_tp_groups, "nccl" if device == "cuda" else "gloo")
    tokens, dtype = media_tokens_of(model_dir), getattr(torch, profile.model.dtype)
    _, plan = build_shards(load_config(model_dir), dtype, **own_degrees(team))
    specs = {name: (shape, dtype) for name, shape in home_shapes(plan).items()}
    homes = residency.place("snapshot", specs, stays=True)
    return AbsentRollout(homes, (tokens.image_token_id, tokens.video_token_id))


def own_degrees(team: Team) -> Degrees:
    """The layout of the weights on a rank: training shards inside the rollout's, or, on a rank that only trains, its
    training shard alone."""
    topology, place = team.topology, team.place
    rollout_tp = topology.rollout_tp if place.decodes else topology.train_tp
    return {"train_tp": topology.train_tp, "training_shard": place.training_shard, "rollout_tp": rollout_tp}


@contextlib.contextmanager
def open_single_rank(device: Literal["cpu", "cuda"]) -> Iterator[None]:
    """A process group of one rank, for work before the run."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(backend_of(device), store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
