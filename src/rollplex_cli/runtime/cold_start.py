"""The supervised cold start: a few steps on the true answers, until the policy is worth sampling from.

RL from chance stalls: groups in which every response fails teach nothing. The cold start ends when the *sampled*
accuracy on the validation split reaches a threshold; a fixed number of steps would not be robust, since learning
here is a sudden transition, and greedy accuracy is a poor signal for it.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollplex_cli.core.seeds import derive_seed
from rollplex_cli.engines.inputs import build_prompt_input
from rollplex_cli.engines.rollout.base import SamplingSettings
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.engines.trainer.supervised import SupervisedTrainer
from rollplex_cli.engines.weights.skeleton import build_skeleton, load_config
from rollplex_cli.engines.weights.views import bind_views
from rollplex_cli.rl.rewards import score
from rollplex_cli.runtime.evaluate import answer_all

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Any

    from rollplex_cli.data.processor import PromptBuilder
    from rollplex_cli.data.tasks import Task
    from rollplex_cli.data.types import Sample
    from rollplex_cli.engines.inputs import MediaTokens, PromptInput
    from rollplex_cli.engines.rollout.base import RolloutEngine
    from rollplex_cli.profile.schema import Profile

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
CLIP_NORM = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStartStep:
    """Progress of the cold start."""

    step: int
    loss: float
    accuracy: float | None
    """Sampled accuracy on the validation split, where it was measured after this step."""


class ColdStart:
    """Trains the base model in place: its parameters are views of the rollout engine's, as in the run itself.

    Args:
        base_dir: checkpoint folder the engine was built from.
        train, validation: rows to learn from, rows that end it. The held-out split is not touched.
    """

    def __init__(
        self,
        profile: Profile,
        engine: RolloutEngine,
        base_dir: Path,
        builder: PromptBuilder,
        task: Task,
        media_tokens: MediaTokens,
        train: Sequence[Sample],
        validation: Sequence[Sample],
    ) -> None:
        self._profile, self._settings = profile, profile.cold_start
        self._engine, self._builder, self._task = engine, builder, task
        config = load_config(base_dir)
        self.model: Any = build_skeleton(config, getattr(torch, profile.model.dtype))
        bind_views(self.model, engine.parameters())
        self._trainer = SupervisedTrainer(
            self.model,
            AdamWSettings(
                lr=self._settings.lr, warmup_steps=self._settings.warmup_steps, betas=BETAS,
                weight_decay=WEIGHT_DECAY, clip_norm=CLIP_NORM,
            ),
        )  # fmt: skip
        self._inputs = [build_prompt_input(builder.build(s), media_tokens) for s in train]
        self._tests = [build_prompt_input(builder.build(s), media_tokens) for s in validation]

    def run(self, on_step: Callable[[ColdStartStep], None]) -> ColdStartStep:
        """Train until the validation accuracy is reached or `cold_start.max_steps` are done; returns the last step."""
        settings = self._settings
        order = random.Random(derive_seed(self._profile.runtime.seed, "cold_start"))
        queue: list[PromptInput] = []
        last = ColdStartStep(step=0, loss=0.0, accuracy=None)
        for step in range(1, settings.max_steps + 1):
            if len(queue) < settings.batch_size:
                queue += order.sample(self._inputs, len(self._inputs))
            batch, queue = queue[: settings.batch_size], queue[settings.batch_size :]
            loss = self._train(batch)
            accuracy = None
            if step >= settings.test_from_step and step % settings.test_every == 0:
                accuracy, worst = self._test(step)
                last = ColdStartStep(step=step, loss=loss, accuracy=accuracy)
                if accuracy >= settings.stop_accuracy and worst >= settings.stop_accuracy_each_kind:
                    on_step(last)
                    return last
            last = ColdStartStep(step=step, loss=loss, accuracy=accuracy)
            on_step(last)
        return last

    def _train(self, batch: Sequence[PromptInput]) -> float:
        targets = [self._builder.encode_response(self._task.answer_text(i.prompt.sample)) for i in batch]
        return self._trainer.step(batch, targets).loss

    def _test(self, step: int) -> tuple[float, float]:
        """(accuracy over all samples, accuracy of the worst kind of question), sampled at the run's temperature."""
        self._engine.publish()
        settings, rollout = self._settings, self._profile.rollout
        tests = self._tests[: settings.test_clips]
        seeds = [
            [
                derive_seed(self._profile.runtime.seed, "cold_start_test", step, i, n)
                for n in range(settings.test_samples)
            ]
            for i in range(len(tests))
        ]
        sampling = SamplingSettings(max_new_tokens=rollout.max_new_tokens, temperature=rollout.temperature)
        right: dict[str, list[bool]] = defaultdict(list)
        for prompt, responses in zip(tests, answer_all(self._engine, tests, sampling, seeds), strict=True):
            sample = prompt.prompt.sample
            for response in responses:
                text = self._builder.decode_response(response.token_ids)
                reward = score(self._task.reward, sample, text, response.finish_reason == "stop")
                right[sample.kind].append(reward.parts.get("exact", reward.total) > 0)
        kinds = [sum(values) / len(values) for values in right.values()]
        total = [value for values in right.values() for value in values]
        return sum(total) / max(1, len(total)), min(kinds, default=0.0)
