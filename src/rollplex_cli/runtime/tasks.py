"""What each task of a step does. One implementation for every schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollplex_cli.core.errors import NonFiniteError
from rollplex_cli.core.names import Lane, TaskKey, TaskKind
from rollplex_cli.core.seeds import derive_seed
from rollplex_cli.engines.rollout.base import GroupRequest, SamplingSettings
from rollplex_cli.rl.advantages import group_advantages
from rollplex_cli.rl.losses import LossResult, LossSettings, policy_loss
from rollplex_cli.rl.packing import PackedSuffix, pack_suffix
from rollplex_cli.rl.rewards import score
from rollplex_cli.runtime.records import GroupRecord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollplex_cli.core.events import EventWriter
    from rollplex_cli.data.processor import PromptBuilder
    from rollplex_cli.data.tasks import Task
    from rollplex_cli.engines.inputs import PromptInput
    from rollplex_cli.engines.reference.reference import Reference
    from rollplex_cli.engines.rollout.base import GroupResult, RolloutEngine
    from rollplex_cli.engines.trainer.actor import Actor, UpdateOutcome
    from rollplex_cli.memory.leases import ObjectStore
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.runtime.executor.executor import Executor, Fence
    from rollplex_cli.runtime.executor.theta import ThetaGuard


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engines of a rank and what scores their answers."""

    rollout: RolloutEngine
    actor: Actor
    reference: Reference | None
    builder: PromptBuilder
    task: Task


class StepTasks:
    """Bodies of the tasks of one step on one rank.

    Args:
        step: number of the step, 1-based.
        first_group: global id of this rank's first group; seeds depend on global ids, so the responses to a prompt
            do not depend on how many ranks share the step.
        inputs: prompts by local group id.
        lengths: response lengths by local group id to replay with the end token ignored (benchmarks).
    """

    def __init__(
        self,
        profile: Profile,
        engines: Engines,
        store: ObjectStore,
        theta: ThetaGuard,
        events: EventWriter,
        *,
        step: int,
        first_group: int,
        inputs: Mapping[int, PromptInput],
        lengths: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        self._profile, self._engines, self._store, self._theta, self._events = profile, engines, store, theta, events
        self._step, self._first_group, self._inputs, self._lengths = step, first_group, inputs, lengths
        algorithm = profile.algorithm
        self._loss_settings = LossSettings(
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            loss_normalizer=algorithm.loss_normalizer,
            kl_coef=algorithm.kl_coef,
            kl_estimator=algorithm.kl_estimator,
        )
        self.records = {g: GroupRecord(group=g, sample_id=i.prompt.sample.sample_id) for g, i in inputs.items()}
        self.scale = 0.0
        """Factor on the accumulated gradient; set by the control thread when the whole batch is known."""
        self.outcome: UpdateOutcome | None = None

    def prompts(self) -> list[tuple[int, PromptInput]]:
        """Local group ids with their prompts."""
        return list(self._inputs.items())

    def bodies(self) -> dict[TaskKind, Callable[[TaskKey], Fence | None]]:
        """Bodies by kind, for the executor."""
        return {
            TaskKind.REWARD: self._reward,
            TaskKind.ADVANTAGE: self._advantage,
            TaskKind.REF_PREFIX: self._ref_prefix,
            TaskKind.REF_SUFFIX: self._ref_suffix,
            TaskKind.ACTOR_PREFIX: self._actor_prefix,
            TaskKind.ACTOR_SUFFIX: self._actor_suffix,
            TaskKind.ACTOR_PREFIX_BACKWARD: self._actor_prefix_backward,
            TaskKind.UPDATE: self._update,
            TaskKind.PUBLISH: self._publish,
        }

    # ---- rollout lane ------------------------------------------------------------------------------------

    def run_rollout(self, executor: Executor) -> None:
        """The rollout lane's job for a step: decode every group, then whatever the graph has for the lane."""
        try:
            self._decode(executor)
        except BaseException as error:
            executor.fail(error)
            raise
        executor.run(Lane.ROLLOUT)

    def _decode(self, executor: Executor) -> None:
        engine = self._engines.rollout
        keys = {g: TaskKey(TaskKind.DECODE, g) for g in self._inputs}
        engine.begin_step()
        executor.begin_decodes(keys.values())
        started = self._events.now()
        engine.submit([self._request(g) for g in self._inputs])
        try:
            while engine.has_work():
                for result in engine.step():
                    self._take(result, keys[result.group], started)
                    executor.complete_decode(keys[result.group])
                executor.touch()
        except BaseException:
            # The engine outlives the step: whoever stopped it may still checkpoint or evaluate.
            engine.abort()
            raise

    def _request(self, group: int) -> GroupRequest:
        rollout, seed = self._profile.rollout, self._profile.runtime.seed
        lengths = self._lengths[group] if self._lengths is not None else None
        return GroupRequest(
            group=group,
            input=self._inputs[group],
            seeds=tuple(
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
        )

    def _take(self, result: GroupResult, key: TaskKey, started: float) -> None:
        record = self.records[result.group]
        record.lengths = [len(r.token_ids) for r in result.responses]
        record.finish = [r.finish_reason for r in result.responses]
        record.sampled_logprobs = [x for r in result.responses for x in r.logprobs]
        record.neg_logprob_sum = -sum(record.sampled_logprobs)
        self._store.put("responses", result, key)
        self._events.record(
            TaskKind.DECODE,
            started,
            self._events.now(),
            step=self._step,
            phase="GENERATE",
            lane=Lane.ROLLOUT,
            group=result.group,
            decode_step=result.decode_step,
            tokens=record.num_tokens,
            cached_tokens=sum(r.cached_tokens for r in result.responses),
        )

    def _publish(self, _key: TaskKey) -> None:
        self._engines.rollout.publish()

    # ---- host lane ---------------------------------------------------------------------------------------

    def _reward(self, key: TaskKey) -> None:
        record, sample = self.records[key.group], self._inputs[key.group].prompt.sample
        with self._store.lease("responses", key) as result:
            for response in result.responses:
                text = self._engines.builder.decode_response(response.token_ids)
                reward = score(self._engines.task.reward, sample, text, response.finish_reason == "stop")
                record.texts.append(text)
                record.rewards.append(reward.total)
                for name, value in reward.parts.items():
                    record.parts.setdefault(name, []).append(value)

    def _advantage(self, key: TaskKey) -> None:
        rewards = self.records[key.group].rewards
        self._store.put("advantages", group_advantages(rewards, self._profile.algorithm.advantage_epsilon), key)

    # ---- trainer lane ------------------------------------------------------------------------------------

    def _ref_prefix(self, key: TaskKey) -> Fence | None:
        assert self._engines.reference is not None
        self._store.put("reference_boundary", self._engines.reference.prefix(self._inputs[key.group]), key)
        return _fence()

    def _ref_suffix(self, key: TaskKey) -> Fence | None:
        assert self._engines.reference is not None
        with self._store.lease("reference_boundary", key) as state, self._store.lease("responses", key) as result:
            logprobs = self._engines.reference.suffix(state, self._pack(key.group, result))
        self._store.put("reference_logprobs", logprobs, key)
        return _fence()

    def _actor_prefix(self, key: TaskKey) -> Fence | None:
        self._store.put("actor_boundary", self._engines.actor.prefix(self._inputs[key.group]), key)
        return _fence()

    def _actor_suffix(self, key: TaskKey) -> Fence | None:
        record = self.records[key.group]
        reference: torch.Tensor | None = None
        with self._store.lease("actor_boundary", key) as state, self._store.lease("responses", key) as result:
            packed = self._pack(key.group, result)
            sampled = torch.tensor(record.sampled_logprobs, dtype=torch.float32)
            old = sampled if self._profile.algorithm.old_logprobs == "rollout" else None
            with self._store.lease("advantages", key) as advantages:
                if self._engines.reference is not None:
                    with self._store.lease("reference_logprobs", key) as reference:
                        pass

                def loss(logprobs: torch.Tensor) -> LossResult:
                    return policy_loss(logprobs, old, advantages, reference, packed.lengths, self._loss_settings)

                outcome = self._engines.actor.suffix(state, packed, loss)
        trained = outcome.logprobs.float().cpu()
        record.trainer_logprobs = trained.tolist()
        difference = (trained - sampled).abs()
        record.diff_sum, record.diff_max = float(difference.sum()), float(difference.max())
        record.loss_sum = float(outcome.loss)
        record.kl_sum, record.clipped_sum = float(outcome.metrics["kl"]), float(outcome.metrics["clipped"])
        if not math.isfinite(record.diff_max):
            raise NonFiniteError(
                f"a log-prob of sample `{record.sample_id}` is not finite in step {self._step}",
                hint="nothing was updated in this step; the last checkpoint is good",
            )
        return _fence()

    def _actor_prefix_backward(self, key: TaskKey) -> Fence | None:
        with self._store.lease("actor_boundary", key) as state:
            self._engines.actor.prefix_backward(state)
        return _fence()

    def _update(self, key: TaskKey) -> Fence | None:
        with self._theta.write(str(key)):
            self.outcome = self._engines.actor.update(self.scale)
        return _fence()

    def _pack(self, group: int, result: GroupResult) -> PackedSuffix:
        prompt = self._inputs[group]
        return pack_suffix(
            prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, [r.token_ids for r in result.responses]
        )


def _fence() -> Fence | None:
    """An event behind everything this thread has launched so far; None on a machine without a GPU."""
    if not torch.cuda.is_initialized():
        return None
    event = torch.cuda.Event()
    event.record()
    return event
