"""What each task of a step does. One implementation for every schedule."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from rollplex_cli.core.errors import NonFiniteError
from rollplex_cli.core.names import Lane, TaskKey, TaskKind
from rollplex_cli.core.seeds import derive_seed
from rollplex_cli.engines.rollout.base import GroupRequest, SamplingSettings
from rollplex_cli.rl.advantages import advantages, kl_penalties, overlong_penalty
from rollplex_cli.rl.losses import kl_terms
from rollplex_cli.rl.packing import PackedSuffix, pack_suffix
from rollplex_cli.runtime.groups.decoding import Decoding
from rollplex_cli.runtime.groups.learning import GroupBatch, Learner
from rollplex_cli.runtime.groups.prefixes import PrefixTasks
from rollplex_cli.runtime.groups.refills import Refills
from rollplex_cli.runtime.groups.vision import StepVision
from rollplex_cli.runtime.pool import DecodePool
from rollplex_cli.runtime.records import GroupRecord
from rollplex_cli.runtime.sharing.streams import record_fence

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollplex_cli.core.events import EventWriter
    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.engines.rollout.base import GroupResult
    from rollplex_cli.engines.trainer.actor import UpdateOutcome
    from rollplex_cli.memory.leases import ObjectStore
    from rollplex_cli.memory.residency import Residency
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.runtime.assembly.rank import Engines
    from rollplex_cli.runtime.executor.executor import Executor, Fence
    from rollplex_cli.runtime.executor.theta import ThetaGuard
    from rollplex_cli.runtime.groups.intake import Started
    from rollplex_cli.runtime.team.team import Team


class StepTasks:
    """Bodies of the tasks of one step on one rank.

    Args:
        step: number of the step, 1-based.
        team: the training group; its replicas share out the decoding.
        first_group: global id of the training group's first group; seeds depend on global ids, so the responses to
            a prompt do not depend on how many ranks share the step.
        inputs: prompts by local group id.
        lengths: response lengths by local group id to replay with the end token ignored (benchmarks).
        started: where the profile takes groups from the rank's line, those in flight by local group id.
        further: takes more of them while the step decodes, for `algorithm.max_refills`.
    """

    def __init__(
        self,
        profile: Profile,
        engines: Engines,
        store: ObjectStore,
        theta: ThetaGuard,
        events: EventWriter,
        residency: Residency,
        *,
        team: Team,
        step: int,
        first_group: int,
        inputs: Mapping[int, PromptInput],
        lengths: Mapping[int, Sequence[int]] | None = None,
        started: Sequence[Started] = (),
        further: Callable[[int], list[Started]] | None = None,
    ) -> None:
        self._profile, self._engines, self._store, self._theta, self._events = profile, engines, store, theta, events
        self._residency = residency
        self._pool = DecodePool(residency, engines.rollout)
        self._team = team
        self._decoded: dict[int, GroupResult] = {}
        """Decoded here and not yet exchanged."""
        self.check: Callable[[], None] = lambda: None
        """Raises if the step was stopped; for tasks that wait for other ranks."""
        self._step, self._first_group, self._lengths = step, first_group, lengths
        self.inputs, self.started = dict(inputs), list(started)
        """Grow as groups are replaced."""
        self.left: list[Started] = []
        """Groups in flight that the step did not finish."""
        self.refills = Refills(list(inputs), profile.algorithm.max_refills, further)
        self.refill_wait_s = 0.0
        """Seconds for which decode waited for further prompts."""
        self.learner = Learner(profile, list(inputs))
        self.vision = StepVision(profile, engines, team, inputs)
        self.prefixes = PrefixTasks(self, profile, engines, store)
        self.records = {g: GroupRecord(group=g, sample_id=i.prompt.sample.sample_id) for g, i in inputs.items()}
        self.scale = 0.0
        """Factor on the accumulated gradient; set by the control thread when the whole batch is known."""
        self.outcome: UpdateOutcome | None = None
        """Of the last update."""
        self.batch_std: float | None = None
        """Deviation of rewards over the whole batch; set by the control thread where the algorithm needs it."""
        self.report_batch: Callable[[int], None] = lambda _batch: None
        """Hears after each decode step how many responses are under way."""

    def prompts(self) -> list[tuple[int, PromptInput]]:
        """Local group ids with their prompts, of the groups that the step finished."""
        return [(group, prompt) for group, prompt in self.inputs.items() if group in self.records]

    @property
    def takes_prefix(self) -> bool:
        """Whether the actor takes its boundary from the rollout: not where another replica may have decoded it."""
        return self._profile.reuse.rollout_prefix and self._team.responses is None

    @property
    def has_peers(self) -> bool:
        """Whether the training group has ranks whose collectives this one meets."""
        return self._team.channel is not None

    def bodies(self) -> dict[TaskKind, Callable[[TaskKey], Fence | None]]:
        """Bodies by kind, for the executor."""
        return {
            TaskKind.EXCHANGE: self._exchange,
            TaskKind.ENCODE: self.prefixes.encode,
            TaskKind.REWARD: self._reward,
            TaskKind.ADVANTAGE: self._advantage,
            TaskKind.REF_PREFIX: self.prefixes.reference,
            TaskKind.REF_SUFFIX: self._ref_suffix,
            TaskKind.ACTOR_PREFIX: self.prefixes.actor,
            TaskKind.ACTOR_SUFFIX: self._actor_suffix,
            TaskKind.ACTOR_PREFIX_BACKWARD: self._actor_prefix_backward,
            TaskKind.UPDATE: self._update,
            TaskKind.PUBLISH: self._publish,
        }

    # ---- rollout lane ------------------------------------------------------------------------------------

    def run_rollout(self, executor: Executor) -> None:
        """The rollout lane's job for a step: decode every group, then whatever the graph has for the lane."""
        try:
            with self._residency.explaining("decode"):
                Decoding(
                    self, executor, self._engines.rollout, self._team, self._pool, self._profile.rollout, self._step
                ).run(self._events.now())
        except BaseException as error:
            executor.fail(error)
            raise
        executor.run(Lane.ROLLOUT)

    def run_trainer(self, executor: Executor) -> None:
        """The trainer lane's job for a step."""
        self._pool.wait_opened()
        executor.run(Lane.TRAINER)

    def replace(self, group: int) -> int | None:
        """Take in the group that is started in place of one without a signal; returns its local id, or None where
        none is. Called by the rollout lane.

        Raises:
            DataError: as `PromptLoader.take`.
        """
        began = time.monotonic()
        found = self.refills.replace(group)
        self.refill_wait_s += time.monotonic() - began
        if found is None:
            return None
        new, started = found
        self.inputs[new] = started.input
        self.started.append(started)
        self.records[new] = GroupRecord(
            group=new, sample_id=started.input.prompt.sample.sample_id, round=self.refills.round_of(new)
        )
        self.learner.replace(group, new)
        return new

    def leave(self, group: int, engine_id: int | None) -> None:
        """A group goes on in the next step, in the engine's group of that id where its tokens are kept."""
        del self.records[group]
        self.started[group].engine_id = engine_id
        self.left.append(self.started[group])

    def request(self, group: int, engine_id: int) -> GroupRequest:
        """What the engine is asked for."""
        rollout, seed = self._profile.rollout, self._profile.runtime.seed
        lengths = self._lengths[group] if self._lengths is not None else None
        return GroupRequest(
            group=engine_id,
            input=self.inputs[group],
            seeds=self.started[group].seeds
            if self.started
            else tuple(
                derive_seed(seed, "rollout", self._step, self._first_group + group, i)
                for i in range(rollout.group_size)
            ),
            settings=SamplingSettings(
                max_new_tokens=rollout.max_new_tokens,
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                ignore_eos=lengths is not None,
            ),
            max_new_tokens=tuple(lengths) if lengths is not None else None,
            keep_prefix=self.takes_prefix,
            keep_vision=self.vision.wanted_of_rollout(group),
        )

    def take(self, result: GroupResult, key: TaskKey, started: float) -> None:
        """Responses that are final, of a decode that began at `started`."""
        if self._team.responses is None:
            self._hand_over(result, key)
        else:
            self._decoded[key.group] = result
        self._events.record(
            TaskKind.DECODE,
            started,
            self._events.now(),
            step=self._step,
            phase="GENERATE",
            lane=Lane.ROLLOUT,
            group=key.group,
            decode_step=result.decode_step,
            tokens=sum(len(r.token_ids) for r in result.responses),
            cached_tokens=sum(r.cached_tokens for r in result.responses),
        )

    def _hand_over(self, result: GroupResult, key: TaskKey) -> None:
        record, version = self.records[key.group], self._engines.rollout.weight_version
        record.lengths = [len(r.token_ids) for r in result.responses]
        record.finish = [r.finish_reason for r in result.responses]
        record.sampled_logprobs = [x for r in result.responses for x in r.logprobs]
        record.neg_logprob_sum = -sum(record.sampled_logprobs)
        stale = [v != version for r in result.responses for v in r.weight_versions]
        record.stale = stale if any(stale) else []
        self._store.put("responses", result, key)

    def _publish(self, _key: TaskKey) -> None:
        self._residency.fill("snapshot")
        self._engines.publisher.publish()

    # ---- host lane ---------------------------------------------------------------------------------------

    def _reward(self, key: TaskKey) -> None:
        record, sample = self.records[key.group], self.inputs[key.group].prompt.sample
        algorithm, limit = self._profile.algorithm, self._profile.rollout.max_new_tokens
        with self._store.lease("responses", key) as result:
            record.texts = [self._engines.builder.decode_response(r.token_ids) for r in result.responses]
            finished = [r.finish_reason == "stop" for r in result.responses]

        def find() -> list[dict[str, float]]:
            return [dict(reward.parts) for reward in self._engines.scorer.score(sample, record.texts, finished)]

        found = self._team.word.of(self._step, f"reward/{key.group}", find, self.check)
        for parts, length in zip(found, record.lengths, strict=True):
            if algorithm.overlong_buffer_tokens:
                parts["overlong"] = overlong_penalty(
                    length, limit, algorithm.overlong_buffer_tokens, algorithm.overlong_penalty
                )
            record.rewards.append(math.fsum(parts.values()))
            for name, value in parts.items():
                record.parts.setdefault(name, []).append(value)
        record.skipped = algorithm.skip_zero_variance and record.zero_variance

    def _advantage(self, key: TaskKey) -> None:
        algorithm, record = self._profile.algorithm, self.records[key.group]
        rewards = list(record.rewards)
        if self._engines.reference is not None and algorithm.kl_in == "reward":
            with self._store.lease("reference_logprobs", key) as reference:
                sampled = torch.tensor(record.sampled_logprobs, dtype=torch.float32)
                kl = kl_terms(sampled, reference.to("cpu", torch.float32), algorithm.kl_estimator)
            penalties = kl_penalties(kl, record.lengths, algorithm.kl_coef)
            rewards = [reward - penalty for reward, penalty in zip(rewards, penalties, strict=True)]
            record.kl_sum = float(kl.sum())
        values = advantages(rewards, algorithm.advantage, algorithm.advantage_epsilon, self.batch_std)
        record.idle = self.learner.may_leave_out and not record.skipped and not bool(values.any())
        self._store.put("advantages", values, key)

    # ---- trainer lane ------------------------------------------------------------------------------------

    def _exchange(self, key: TaskKey) -> None:
        own = self._decoded.pop(key.group, None)
        result = self._team.exchange_responses(key.group, self._profile.rollout.group_size, own)
        if self._team.place.trains:
            self._hand_over(result, key)

    def _ref_suffix(self, key: TaskKey) -> Fence | None:
        assert self._engines.reference is not None
        with self._store.lease("reference_boundary", key) as state, self._store.lease("responses", key) as result:
            logprobs = self._engines.reference.suffix(state, self._pack(key.group, result))
        self._store.put("reference_logprobs", logprobs, key)
        return record_fence()

    def _actor_suffix(self, key: TaskKey) -> Fence | None:
        record, learner = self.records[key.group], self.learner
        if record.skipped:
            return None
        if record.idle:
            record.weight = learner.leave_out(self._batch(key, record))
            return None
        first = learner.update == 0
        batch = self._batch(key, record) if first else learner.batches[key.group]
        with self._store.lease("actor_boundary", key) as state:
            logprobs, outcome = learner.suffix(self._engines.actor, key.group, state, batch)
        if first:
            record.take_logprobs(logprobs, batch.sampled)
        if outcome is not None:
            record.take_outcome(outcome, kl_in_loss=batch.reference is not None)
        if not math.isfinite(record.diff_max):
            raise NonFiniteError(
                f"a log-prob of sample `{record.sample_id}` is not finite in step {self._step}",
                hint="nothing was updated in this step; the last checkpoint is good",
            )
        return record_fence()

    def _batch(self, key: TaskKey, record: GroupRecord) -> GroupBatch:
        algorithm, reference = self._profile.algorithm, None
        with self._store.lease("responses", key) as result:
            packed = self._pack(key.group, result)
        with self._store.lease("advantages", key) as values:
            pass
        if self._engines.reference is not None and algorithm.kl_in == "loss":
            with self._store.lease("reference_logprobs", key) as reference:
                pass
        return GroupBatch.of(record, packed, values, reference, mask_truncated=algorithm.mask_truncated)

    def _actor_prefix_backward(self, key: TaskKey) -> Fence | None:
        if self.records[key.group].idle and not self._store.holds("actor_boundary", key):
            return None
        with self._store.lease("actor_boundary", key) as state:
            self.learner.prefix_backward(self._engines.actor, key.group, state)
        return record_fence()

    def _update(self, key: TaskKey) -> Fence | None:
        self.prefixes.end()
        with self._theta.write(str(key)):
            self.outcome = self._engines.actor.update(self.scale)
        ended, stats = self._events.now(), asdict(self.outcome.stats)
        started = ended - stats.pop("seconds")
        self._events.record(
            "optimizer", started, ended, step=self._step, phase="UPDATE", lane=Lane.TRAINER, group=None, **stats
        )
        return record_fence()

    def _pack(self, group: int, result: GroupResult) -> PackedSuffix:
        prompt = self.inputs[group]
        return pack_suffix(
            prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, [r.token_ids for r in result.responses]
        )
