"""The words of a step, shared by planner, runtime and report: task kinds, lanes and phases."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class TaskKind(StrEnum):
    """What a task does. All but UPDATE and PUBLISH exist once per prompt group; PREFILL and ENCODE only where roles
    share what the vision tower puts out."""

    DECODE = "decode"
    PREFILL = "prefill"
    ENCODE = "encode"
    EXCHANGE = "exchange"
    REWARD = "reward"
    ADVANTAGE = "advantage"
    REF_PREFIX = "ref_prefix"
    REF_SUFFIX = "ref_suffix"
    ACTOR_PREFIX = "actor_prefix"
    ACTOR_SUFFIX = "actor_suffix"
    ACTOR_PREFIX_BACKWARD = "actor_prefix_backward"
    UPDATE = "update"
    PUBLISH = "publish"


class Lane(StrEnum):
    """Which thread of a rank runs a task."""

    ROLLOUT = "rollout"
    TRAINER = "trainer"
    HOST = "host"


class Phase(StrEnum):
    """State of a rank. A run begins and ends in PUBLISH: theta is complete and nobody reads it."""

    GENERATE = "GENERATE"
    LEARN = "LEARN"
    UPDATE = "UPDATE"
    PUBLISH = "PUBLISH"
    CHECKPOINT = "CHECKPOINT"
    EVALUATE = "EVALUATE"
    FAILED = "FAILED"


NO_GROUP = -1
"""Group of a task that exists once per step."""


class TaskKey(NamedTuple):
    """Identity of a task within a step."""

    kind: TaskKind
    group: int = NO_GROUP

    def __str__(self) -> str:
        return str(self.kind) if self.group == NO_GROUP else f"{self.kind}[{self.group}]"
