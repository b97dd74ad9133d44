"""The tasks of a step that depend on prompts alone: the vision tower, and the prefixes of reference and actor."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rollplex_cli.core.names import TaskKind
from rollplex_cli.runtime.groups.packs import PrefixPacks
from rollplex_cli.runtime.sharing.streams import record_fence

if TYPE_CHECKING:
    from rollplex_cli.core.names import TaskKey
    from rollplex_cli.engines.trainer.model.vision import Encoded
    from rollplex_cli.memory.leases import ObjectStore
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.runtime.assembly.rank import Engines
    from rollplex_cli.runtime.executor.executor import Fence
    from rollplex_cli.runtime.tasks import StepTasks


class PrefixTasks:
    """Bodies of ENCODE, REF_PREFIX and ACTOR_PREFIX. Called from the trainer thread.

    Groups that share a pass of prefixes share one of a frozen tower, so both come to the same bits whether or not the
    tower's output is shared between the roles. What the rollout's tower yields is of one group, which runs alone.

    Args:
        tasks: the step, whose inputs may grow by groups that run alone.
    """

    def __init__(self, tasks: StepTasks, profile: Profile, engines: Engines, store: ObjectStore) -> None:
        self._tasks, self._engines, self._store = tasks, engines, store
        shared = tasks.vision.shared
        alone = shared.groups if shared is not None and shared.from_rollout else ()
        self.packs = PrefixPacks(tasks.inputs, profile.prefix_pack_tokens, alone)
        self._encoded: dict[tuple[int, ...], Encoded] = {}
        """Output of the trainer's own tower for the groups of a pass that have media, until all roles have taken it."""
        self._roles = {TaskKind.ACTOR_PREFIX}
        if shared is not None and shared.for_reference and engines.reference is not None:
            self._roles.add(TaskKind.REF_PREFIX)
        self._taken: dict[tuple[int, ...], set[TaskKind]] = {}

    def encode(self, key: TaskKey) -> Fence | None:
        """Features of a group for the roles that share them; None where its prefix is not needed, or has run with that
        of another group."""
        needed = not self._is_idle(key) and self._taken.get(self._with_media(key.group), set()) != self._roles
        features = self._features(key.group) if needed else None
        self._store.put("vision_features", features, key)
        return record_fence()

    def reference(self, key: TaskKey) -> Fence | None:
        """The reference's boundary."""
        reference = self._engines.reference
        assert reference is not None
        run = partial(reference.prefixes, media=self._media(key))
        self._store.put("reference_boundary", self.packs.take(key.kind, key.group, run), key)
        return record_fence()

    def actor(self, key: TaskKey) -> Fence | None:
        """The actor's boundary; none for groups without a gradient, where that is known in time."""
        if self._is_idle(key):
            return None
        actor, media, adopted = self._engines.actor, self._media(key), self._tasks.takes_prefix
        prompt = self._tasks.inputs[key.group]
        boundary = None
        if adopted and self._tasks.learner.update == 0:
            with self._store.lease("responses", key) as result:
                boundary = result.prefix

        if boundary is not None:
            state = actor.adopt_prefix(prompt, boundary, media)
        elif adopted:
            state = actor.prefix(prompt, media)
        else:
            state = self.packs.take(key.kind, key.group, partial(actor.prefixes, media=media))
        self._store.put("actor_boundary", state, key)
        return record_fence()

    def end(self) -> None:
        """No prefix follows in this step."""
        self._encoded.clear()

    def _is_idle(self, key: TaskKey) -> bool:
        """Whether neither this group nor one that shares its pass has a gradient, as far as that is known.

        It may be known here and not yet on a rank whose collectives this one must meet.
        """
        if self._tasks.has_peers or self.packs.waits(TaskKind.ACTOR_PREFIX, key.group):
            return False
        return all(self._tasks.records[group].idle for group in self.packs.members(key.group))

    def _media(self, key: TaskKey) -> Encoded | None:
        """The tower's output that a prefix task is to take for its pass; None where it runs the tower itself, and where
        the pass has run."""
        tasks, shared = self._tasks, self._tasks.vision.shared
        if shared is None or tasks.learner.update or self.packs.waits(key.kind, key.group):
            return None
        if key.kind is TaskKind.REF_PREFIX and not shared.for_reference:
            return None
        if shared.from_rollout:
            if key.group not in shared.groups:
                return None
            with self._store.lease("vision_features", key) as features:
                return features  # type: ignore[no-any-return]  # the store holds objects of any type
        if key.kind is TaskKind.ACTOR_PREFIX and tasks.takes_prefix:
            # Of each group by itself, whoever shared the tower's pass.
            return self._features(key.group) if key.group in shared.groups else None
        features, members = self._of_pass(key.group), self._with_media(key.group)
        self._taken.setdefault(members, set()).add(key.kind)
        if self._taken[members] == self._roles:
            self._encoded.pop(members, None)
        return features

    def _with_media(self, group: int) -> tuple[int, ...]:
        """Groups of a group's pass whose features are shared."""
        shared = self._tasks.vision.shared
        assert shared is not None
        return tuple(member for member in self.packs.members(group) if member in shared.groups)

    def _of_pass(self, group: int) -> Encoded | None:
        """The tower's output for all groups that share a group's pass; None where none has media."""
        members = self._with_media(group)
        if members and members not in self._encoded:
            self._encoded[members] = self._tasks.vision.encode_own(members)
        return self._encoded.get(members)

    def _features(self, group: int) -> Encoded | None:
        """The tower's output for a group with media; None where the actor's prefix is to run the tower."""
        vision = self._tasks.vision
        assert vision.shared is not None
        if vision.shared.from_rollout:
            return vision.encode(group)
        whole, members = self._of_pass(group), self._with_media(group)
        assert whole is not None
        return whole if len(members) == 1 else whole.split([vision.rows(m) for m in members])[members.index(group)]
