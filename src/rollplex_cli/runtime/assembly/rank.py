"""A rank at work: its engines, lanes and accounts, held together."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollplex_cli.core.names import NO_GROUP, Lane, TaskKey
from rollplex_cli.memory.leases import ObjectStore
from rollplex_cli.runtime.executor.phases import PhaseMachine
from rollplex_cli.runtime.executor.theta import ThetaGuard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollplex_cli.core.events import EventWriter
    from rollplex_cli.core.names import TaskKind
    from rollplex_cli.core.paths import RunFolder
    from rollplex_cli.data.loader import PromptLoader
    from rollplex_cli.data.processor import PromptBuilder
    from rollplex_cli.data.tasks import Task
    from rollplex_cli.engines.inputs import MediaTokens
    from rollplex_cli.engines.reference.reference import Reference
    from rollplex_cli.engines.rollout.base import RolloutEngine
    from rollplex_cli.engines.trainer.actor import Actor
    from rollplex_cli.engines.weights.shards import ShardPlan
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.rl.rewards.scorer import Scorer
    from rollplex_cli.runtime.assembly.build_memory import RankMemory
    from rollplex_cli.runtime.control.control import Control
    from rollplex_cli.runtime.control.peers import Peers
    from rollplex_cli.runtime.executor.lanes import LaneThread
    from rollplex_cli.runtime.sharing.sharing import Sharing
    from rollplex_cli.runtime.team.team import Publisher, Team


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engines of a rank and what scores their answers."""

    rollout: RolloutEngine
    own_actor: Actor | None
    """None on a rank that only decodes."""
    reference: Reference | None
    builder: PromptBuilder
    task: Task
    scorer: Scorer
    publisher: Publisher

    @property
    def actor(self) -> Actor:
        """The actor of a rank that trains."""
        assert self.own_actor is not None, "this rank only decodes"
        return self.own_actor


@dataclass(slots=True, kw_only=True)
class Rank:
    """One process of the run.

    The rollout lane owns every call of the rollout engine, the trainer lane every call of actor and reference; the
    control thread (the process's main thread) calls neither.
    """

    profile: Profile
    run: RunFolder
    peers: Peers
    control: Control
    events: EventWriter
    machine: PhaseMachine
    rollout_lane: LaneThread
    trainer_lane: LaneThread
    host_lane: LaneThread
    engines: Engines
    loader: PromptLoader
    media_tokens: MediaTokens
    team: Team
    plan: ShardPlan
    """Of the weights."""
    first_group: int
    """Global id of the training group's first prompt group in a step."""
    sharing: Sharing
    memory: RankMemory
    theta: ThetaGuard = field(default_factory=ThetaGuard)
    store: ObjectStore = field(default_factory=ObjectStore)

    @contextmanager
    def span(self, kind: TaskKind, lane: Lane, group: int) -> Iterator[None]:
        """Event span of a task, whose name its collectives bear."""
        self.team.launches.begin(lane, str(TaskKey(kind, group)))
        with self.events.span(
            kind,
            step=self.control.step,
            phase=self.machine.state,
            lane=lane,
            group=None if group == NO_GROUP else group,
        ):
            yield

    def stop_agreed(self, name: str) -> bool:
        """Whether a signal asked any rank to stop; a meeting of all ranks, on the control thread."""
        every = self.peers.meet(name, {"stop": self.control.stop_requested}, self.control.tick)
        return any(theirs["stop"] for theirs in every)

    @property
    def lanes(self) -> tuple[LaneThread, ...]:
        """All lanes, in the order in which they are closed."""
        return (self.host_lane, self.trainer_lane, self.rollout_lane)
