"""Building actor and reference of a rank over the rollout's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from rollplex_cli.engines.reference.reference import Reference
from rollplex_cli.engines.trainer.actor import Actor
from rollplex_cli.engines.trainer.optimizer import AdamWSettings
from rollplex_cli.engines.weights.draw import RandomReader, random_seed_of
from rollplex_cli.engines.weights.load import CheckpointReader, fill_homes, fill_parameters
from rollplex_cli.engines.weights.skeleton import build_shards, build_skeleton, load_config, parameter_shapes
from rollplex_cli.engines.weights.views import bind_views
from rollplex_cli.runtime.assembly.devices import device_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any, Literal

    from rollplex_cli.engines.weights.shards import Box, ShardPlan
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.runtime.team.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What trains, and the plan of its weights."""

    actor: Actor
    reference: Reference | None
    plan: ShardPlan


def build_trainer(
    profile: Profile, base_dir: Path, rollout_params: Mapping[str, torch.Tensor], banned: Sequence[int], team: Team
) -> Trainer:
    """Load the base checkpoint into the rollout's tensors; actor on views of them, reference on a copy of its own
    where KL needs one.

    Call it on the thread that will own both; every rank at the same point.

    Raises:
        UsageError: a checkpoint that cannot be read or is not of the model its configuration describes.
    """
    config, dtype = load_config(base_dir), getattr(torch, profile.model.dtype)
    topology, place = team.topology, team.place
    reader = open_weights(base_dir, config, device_of(profile))
    degrees = {
        "train_tp": topology.train_tp, "training_shard": place.training_shard, "rollout_tp": topology.rollout_tp
    }  # fmt: skip
    model, plan = build_shards(config, dtype, **degrees)
    bind_views(model, rollout_params, plan)
    fill_homes(plan, rollout_params, reader.read)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()  # the rollout reads them on another stream
    shard, settings = team.shard(plan), profile.optimizer
    actor = Actor(
        model,
        optimizer=AdamWSettings(
            lr=settings.lr,
            warmup_steps=settings.warmup_steps,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            clip_norm=settings.clip_norm,
            chunk_elements=settings.chunk_elements,
        ),
        temperature=profile.rollout.temperature,
        banned_token_ids=banned,
        prefix_activations=profile.schedule.prefix_activations,
        suffix_kept_layers=profile.schedule.suffix_kept_layers,
        data_parallel_group=team.groups.data,
        freeze_vision=profile.model.freeze_vision,
        shard=shard,
    )
    if profile.algorithm.kl_coef == 0:
        return Trainer(actor=actor, reference=None, plan=plan)
    frozen, _ = build_shards(config, dtype, **degrees)
    fill_parameters(plan, frozen, reader.read, device_of(profile))
    reference = Reference(frozen, temperature=profile.rollout.temperature, banned_token_ids=banned, shard=shard)
    return Trainer(actor=actor, reference=reference, plan=plan)


class Weights(Protocol):
    """Where first weights come from."""

    def read(self, tensor: str, box: Box) -> torch.Tensor:
        """The elements of a box of a Hugging Face tensor."""


def open_weights(base_dir: Path, config: Any, device: Literal["cpu", "cuda"]) -> Weights:
    """The weights of a base folder: its safetensors, or random ones where it is marked so."""
    shapes, seed = parameter_shapes(build_skeleton(config, torch.float32)), random_seed_of(base_dir)
    if seed is None:
        return CheckpointReader(base_dir, config, shapes)
    return RandomReader(seed, shapes, config.vision_config.intermediate_size, torch.device(device))
