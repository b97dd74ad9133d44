"""What `rollplex bench --ablate` can leave out, and whether there is anything to leave out and room for it."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import DoesNotFitError, UsageError
from rollplex_cli.profile.sharing import parse_policy

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rollplex_cli.plan.build import Plan
    from rollplex_cli.plan.fit import Machine
    from rollplex_cli.plan.memory import Ablation as Measure
    from rollplex_cli.profile.schema import Profile


class Ablation(StrEnum):
    """What `--ablate` leaves out: of the overlap, of what is reused, of what is released within a step, or rollout
    degrees below the trainer's."""

    reference_overlap = "reference-overlap"
    actor_overlap = "actor-overlap"
    early_groups = "early-groups"
    vision_reuse = "vision-reuse"
    kv_release = "kv-release"
    reference_release = "reference-release"
    snapshot_release = "snapshot-release"
    matched_tp = "matched-tp"


OVERLAPS = (Ablation.reference_overlap, Ablation.actor_overlap, Ablation.early_groups)
OF_THE_REFERENCE = (Ablation.reference_overlap, Ablation.reference_release)


def require_ablations(
    job: Profile, plan: Plan, machine: Machine, policies: Sequence[str], ablations: Iterable[Ablation]
) -> None:
    """Say what cannot be measured before anything runs.

    Raises:
        UsageError: the job does not have what would be left out.
        DoesNotFitError: what would stay through the step has no room.
    """
    from rollplex_cli.plan.memory import RELEASES

    for name in ablations:
        if lacking := _lacking(job, plan, policies, name):
            said, hint = lacking
            raise UsageError(f"`--ablate {name}` would change nothing: {said}", hint=hint)
        if name in RELEASES:
            _require_room(plan, machine, name, RELEASES[name])


def _lacking(job: Profile, plan: Plan, policies: Sequence[str], name: Ablation) -> tuple[str, str] | None:
    """Why there is nothing to leave out, and a hint."""
    from rollplex_cli.plan.memory import RELEASES
    from rollplex_cli.plan.memory.objects import foreign_bytes
    from rollplex_cli.plan.vision import vision_source

    schedule, degrees = job.schedule, job.topology
    policy = (*policies, schedule.policy)[0]
    if name in OVERLAPS and not parse_policy(policy).overlap:
        return f"policy `{policy}` overlaps nothing", "name another `--policy` first"
    if name in OF_THE_REFERENCE and not plan.memory_inputs.has_reference:
        return f"got `algorithm.kl_coef` {job.algorithm.kl_coef:g}, so there is no reference", "leave it out"
    if name is Ablation.early_groups and not schedule.early_groups:
        return "got `schedule.early_groups` false", "set it to true"
    if name is Ablation.vision_reuse and vision_source(job) == "each":
        return "every role runs its own vision tower", "set `reuse.vision`, or freeze the tower"
    if name in RELEASES and job.memory.residency == "resident":
        return "`memory.residency: resident` releases nothing", "set it to `managed`"
    if name is Ablation.snapshot_release and not foreign_bytes(plan.memory_inputs):
        return "a rank holds no rows that only others train", "leave it out"
    if name is Ablation.matched_tp and degrees.rollout_tp == degrees.train_tp:
        higher = "a lower `topology.rollout_tp`" if degrees.train_tp > 1 else "`topology.train_tp` above 1"
        return f"got `topology.rollout_tp` {degrees.rollout_tp}, which is `topology.train_tp` already", f"set {higher}"
    return None


def _require_room(plan: Plan, machine: Machine, name: Ablation, measure: Measure) -> None:
    from rollplex_cli.plan.fit import memory_reasons
    from rollplex_cli.plan.memory import ablation_costs

    [cost] = ablation_costs(plan.memory_inputs, (measure,))
    if reasons := memory_reasons(dataclasses.replace(plan, memory=cost.ledger), machine):
        raise DoesNotFitError(
            f"`--ablate {name}` does not fit" + "".join(f"\n  {reason}" for reason in reasons),
            hint="what the budget leaves goes to kept prefixes: set `schedule.prefix_kept_tokens` lower, or "
            f"`schedule.prefix_activations` to `recompute`; `rollplex profile-memory --ablate {measure}` has it moment "
            "by moment",
        )
