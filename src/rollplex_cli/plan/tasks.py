"""How many tasks, prompts and tokens one step has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex_cli.core.names import TaskKind

if TYPE_CHECKING:
    from rollplex_cli.plan.vision import VisionSource


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskCounts:
    """One step of one rank, unless a name says otherwise."""

    prompts_per_step: int
    """Over all ranks."""
    responses_per_step: int
    """Over all ranks."""
    groups_per_training_group: int
    """Prompt groups that a training group trains; its ranks work on each of them together."""
    groups_per_replica: int
    """Most prompt groups that a rollout replica decodes."""
    per_rank: dict[str, int]
    """Task kind to number of tasks."""
    max_prompt_tokens: int
    """Upper bound of prompt tokens over all ranks, from the profile's limits."""
    max_response_tokens: int
    """Upper bound of response tokens over all ranks."""


def count_tasks(
    *,
    prompts_per_step: int,
    group_size: int,
    data_parallel: int,
    replicas_per_group: int,
    max_prompt_tokens: int,
    max_new_tokens: int,
    has_reference: bool,
    vision: VisionSource = "each",
) -> TaskCounts:
    """Count from the profile's numbers; `prompts_per_step` is a multiple of `data_parallel`."""
    groups = prompts_per_step // data_parallel
    decoded = -(-groups // replicas_per_group)
    reference = groups if has_reference else 0
    per_rank = dict.fromkeys(TaskKind, groups)
    per_rank[TaskKind.DECODE] = decoded
    per_rank[TaskKind.REF_PREFIX] = per_rank[TaskKind.REF_SUFFIX] = reference
    # Text alone has none of these two.
    per_rank[TaskKind.ENCODE] = 0 if vision == "each" else groups
    per_rank[TaskKind.PREFILL] = decoded if vision == "rollout" else 0
    per_rank[TaskKind.UPDATE] = per_rank[TaskKind.PUBLISH] = 1
    responses = prompts_per_step * group_size
    return TaskCounts(
        prompts_per_step=prompts_per_step,
        responses_per_step=responses,
        groups_per_training_group=groups,
        groups_per_replica=decoded,
        per_rank={str(kind): count for kind, count in per_rank.items()},
        max_prompt_tokens=prompts_per_step * max_prompt_tokens,
        max_response_tokens=responses * max_new_tokens,
    )
