"""Building actor and reference of a rank over the rollout's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from rollplex_cli.engines.lora.adapters import AdaptedReader
from rollplex_cli.engines.reference.reference import Reference
from rollplex_cli.engines.trainer.actor import Actor
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.engines.weights.draw import RandomReader, random_seed_of
from rollplex_cli.engines.weights.exchange import foreign_rows
from rollplex_cli.engines.weights.load import CheckpointReader, fill_homes, fill_parameters
from rollplex_cli.engines.weights.skeleton import (
    build_shards,
    build_skeleton,
    load_config,
    parameter_shapes,
    vision_mlp_width,
)
from rollplex_cli.engines.weights.views import bind_views
from rollplex_cli.memory.regions import Content
from rollplex_cli.runtime.assembly.build_memory import gradient_memory, optimizer_staging, place_staging
from rollplex_cli.runtime.assembly.build_rollout import lora_settings, own_degrees
from rollplex_cli.runtime.assembly.devices import device_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from typing import Any, Literal

    from rollplex_cli.engines.weights.shards import Box, ShardPlan
    from rollplex_cli.memory.residency import Residency
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.runtime.team.team import Team


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """What trains, and the plans of its weights."""

    actor: Actor | None
    """None on a rank that only decodes."""
    reference: Reference | None
    plans: tuple[ShardPlan, ...]
    """Of the rank's training shard; of all those in its rollout shard where it only decodes, in their order."""


def build_trainer(
    profile: Profile,
    base_dir: Path,
    rollout_params: Mapping[str, torch.Tensor],
    banned: Sequence[int],
    team: Team,
    residency: Residency,
) -> Trainer:
    """Load the base checkpoint into the rollout's tensors; actor on views of them with its optimizer's state in
    page-locked memory; reference on a copy of its own where KL needs one, or on the same views without the adapters
    that are trained beside them. Gradients, staging memory and reference are without memory until their next lease. A
    rank that only decodes is left at the first of these.

    Call it on the thread that will own both; every rank at the same point.

    Raises:
        UsageError: a checkpoint that cannot be read or is not of the model its configuration describes.
        OutOfMemoryError: over `memory.budget_gib` or `memory.host_budget_gib`, or the host's memory cannot be
            page-locked.
    """
    config, dtype = load_config(base_dir), getattr(torch, profile.model.dtype)
    reader = open_weights(base_dir, config, device_of(profile))
    degrees, lora = own_degrees(team), lora_settings(profile)
    model, plan = build_shards(config, dtype, lora=lora, **degrees)
    bind_views(model, rollout_params, plan)
    fill_homes(plan, rollout_params, AdaptedReader(reader.read, plan, profile.runtime.seed).read)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()  # the rollout reads them on another stream
    if not team.place.trains:
        q = team.topology.replicas_per_group
        shards = range(q * team.place.rollout_shard, q * (team.place.rollout_shard + 1))
        plans = tuple(build_shards(config, dtype, **(degrees | {"training_shard": shard}))[1] for shard in shards)
        return Trainer(actor=None, reference=None, plans=plans)
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
            master=settings.master,
        ),
        temperature=profile.rollout.temperature,
        banned_token_ids=banned,
        prefix_activations=profile.schedule.prefix_activations,
        prefix_kept_tokens=profile.schedule.prefix_kept_tokens,
        suffix_kept_layers=profile.schedule.suffix_kept_layers,
        data_parallel_group=team.groups.data,
        freeze_vision=profile.model.freeze_vision,
        shard=shard,
        gradient_memory=gradient_memory(residency),
        host=residency.manager.host,
        staging=optimizer_staging(residency),
        lora=lora,
    )
    residency.rest("gradients")
    place_staging(residency, actor.staging_bytes)
    if profile.algorithm.kl_coef == 0:
        return Trainer(actor=actor, reference=None, plans=(plan,))
    options: dict[str, Any] = {"temperature": profile.rollout.temperature, "banned_token_ids": banned, "shard": shard}
    if lora is not None:
        return Trainer(actor=actor, reference=Reference(model, **options), plans=(plan,))
    frozen, _ = build_shards(config, dtype, lora=None, **degrees)
    shapes = {name: (tuple(param.shape), param.dtype) for name, param in frozen.named_parameters()}
    places = residency.place("reference_weights", shapes, content=Content.CONSTANT)
    fill_parameters(plan, frozen, reader.read, device_of(profile), places)
    reference = Reference(frozen, **options)
    residency.rest("reference_weights")
    return Trainer(actor=actor, reference=reference, plans=(plan,))


def foreign_weights(profile: Profile, base_dir: Path, team: Team) -> dict[str, list[tuple[int, int]]]:
    """Rows of the rollout's tensors that other ranks train, see `foreign_rows`; none where adapters are trained, beside
    weights that no publish writes again, or where no rank does both, and what lies in them has no other place here."""
    if profile.lora is not None or team.topology.disaggregated:
        return {}
    config, dtype = load_config(base_dir), getattr(torch, profile.model.dtype)
    return foreign_rows(build_shards(config, dtype, lora=None, **own_degrees(team))[1])


class Weights(Protocol):
    """Where first weights come from."""

    def read(self, tensor: str, box: Box) -> torch.Tensor:
        """The elements of a box of a Hugging Face tensor."""


def open_weights(base_dir: Path, config: Any, device: Literal["cpu", "cuda"]) -> Weights:
    """The weights of a base folder: its safetensors, or random ones where it is marked so."""
    shapes, seed = parameter_shapes(build_skeleton(config, torch.float32)), random_seed_of(base_dir)
    if seed is None:
        return CheckpointReader(base_dir, config, shapes)
    return RandomReader(seed, shapes, vision_mlp_width(config), torch.device(device))
