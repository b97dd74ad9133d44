"""Vision features of a step that several roles use: which groups have them, who computes them, and when they are there.

`reuse.vision` takes them from the rollout's prefill, `reuse.frozen_vision` from the trainer's own tower. The rollout
lane opens and completes PREFILL, the trainer lane runs ENCODE, which hands the features to the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rollplex_cli.core.names import TaskKey, TaskKind
from rollplex_cli.engines.trainer.model.vision import Encoded
from rollplex_cli.plan.vision import vision_source
from rollplex_cli.runtime.executor.graph import SharedVision

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.engines.rollout.base import VisionOutput
    from rollplex_cli.plan.vision import VisionSource
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.runtime.assembly.rank import Engines
    from rollplex_cli.runtime.executor.executor import Executor
    from rollplex_cli.runtime.team.team import Team


class StepVision:
    """The vision features of one step on one rank.

    Features are of this step's weights: nothing here outlives the step, and the rollout forgets its own at a publish.

    Args:
        inputs: prompts by local group id.
    """

    def __init__(self, profile: Profile, engines: Engines, team: Team, inputs: Mapping[int, PromptInput]) -> None:
        self._engines, self._team, self._inputs = engines, team, inputs
        self._frozen = profile.frozen_vision
        self._taken: dict[int, VisionOutput] = {}
        self._open: set[int] = set()
        """Groups whose PREFILL runs."""
        self.shared = self._shared(vision_source(profile))
        """What the graph is to share; None for nothing. The same on every rank of a training group."""

    def _shared(self, source: VisionSource) -> SharedVision | None:
        if source == "each":
            return None
        groups = frozenset(g for g, prompt in self._inputs.items() if prompt.prompt.media)
        return SharedVision(groups=groups, from_rollout=source == "rollout", for_reference=self._frozen)

    def wanted_of_rollout(self, group: int) -> bool:
        """Whether the rollout is to offer the features of a group."""
        return self.shared is not None and self.shared.from_rollout and group in self.shared.groups

    # ---- rollout lane ------------------------------------------------------------------------------------

    def begin(self, executor: Executor, own: Iterable[int]) -> None:
        """The prefills of the step begin; those of groups that another replica decodes are none of this rank's."""
        groups = [g for g in self._inputs if self.wanted_of_rollout(g)]
        if not groups:
            return
        executor.begin_decodes([TaskKey(TaskKind.PREFILL, g) for g in groups])
        self._open = set(groups)
        for group in sorted(self._open - set(own)):
            self.close(executor, group)

    def take(self, executor: Executor, found: Iterable[VisionOutput], groups: Mapping[int, int]) -> None:
        """The rollout has found features; `groups` maps its ids to local ones."""
        for output in found:
            group = groups[output.group]
            if group in self._open:
                self._taken[group] = output
                self._open.discard(group)
                executor.complete_decode(TaskKey(TaskKind.PREFILL, group), output.ready)

    def close(self, executor: Executor, group: int) -> None:
        """No features will come for a group any more: one that went on with all its tokens was not prefilled again."""
        if group in self._open:
            self._open.discard(group)
            executor.complete_decode(TaskKey(TaskKind.PREFILL, group))

    def leave(self, executor: Executor, group: int) -> None:
        """The step ends without this group."""
        self._taken.pop(group, None)
        if group in self._open:
            self._open.discard(group)
            executor.leave_decode(TaskKey(TaskKind.PREFILL, group))

    # ---- trainer lane ------------------------------------------------------------------------------------

    def encode(self, group: int) -> Encoded | None:
        """The features of a group: the rollout's, brought here where another replica has them, else the trainer's own.

        None where the rollout has none and the tower is trained: the actor's prefix then runs it.
        """
        assert self.shared is not None
        output, actor = self._taken.pop(group, None), self._engines.actor
        columns = _joined(output) if output is not None else None
        if self.shared.from_rollout and self._team.responses is not None:
            columns = self._broadcast(group, columns)
        if columns is not None:
            return Encoded.of_columns(columns, actor.split.weights.embed.shape[1])
        return self.encode_own([group]) if self._frozen else None

    def encode_own(self, groups: Sequence[int]) -> Encoded:
        """Those of groups with media by the trainer's own frozen tower, end to end."""
        features = self._engines.actor.encode([self._inputs[group] for group in groups])
        assert features is not None
        return features

    def rows(self, group: int) -> int:
        """Placeholders of a group's prompt, which is how many rows its features have."""
        return sum(last - first + 1 for first, last in self._inputs[group].media_spans)

    def _broadcast(self, group: int, own: torch.Tensor | None) -> torch.Tensor:
        weights = self._engines.actor.split.weights
        source = self._team.owner_of(group)
        shape = (self.rows(group), weights.embed.shape[1] * (1 + len(weights.vision.deepstack)))
        if dist.get_rank() == source:
            assert own is not None and own.shape == shape, group
            columns = own.to(weights.dtype).contiguous()
        else:
            columns = torch.empty(shape, dtype=weights.dtype, device=weights.device)
        shard = self._engines.actor.shard
        assert shard is not None  # there are several replicas
        parallel = shard.parallel
        with parallel.log.launch("broadcast", parallel.name, columns.nbytes):
            dist.broadcast(columns, src=source, group=parallel.group)
        return columns


def _joined(output: VisionOutput) -> torch.Tensor:
    """The pieces as one tensor, in this thread's stream, which waits for them already. They are the rollout's memory:
    every stream that reads them says so (`SplitModel` does for what comes of it)."""
    for piece in output.pieces:
        if piece.is_cuda:
            piece.record_stream(torch.cuda.current_stream())
    return output.pieces[0] if len(output.pieces) == 1 else torch.cat(output.pieces)
