"""Supervised training on given answers (the cold start); one process, no engine."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rollplex_cli.core.errors import NonFiniteError
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.engines.trainer.adamw.streaming import StreamingAdamW
from rollplex_cli.engines.trainer.arena import GradientArena
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.trainer.split import SplitModel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex_cli.engines.inputs import PromptInput


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedOutcome:
    """One supervised step."""

    loss: float
    """Mean negative log-likelihood per target token before the update."""
    grad_norm: float
    lr: float


class SupervisedTrainer:
    """Trains `hf_model` in place on (prompt, answer tokens) pairs."""

    def __init__(self, hf_model: Any, settings: AdamWSettings) -> None:
        params = dict(hf_model.named_parameters())
        self._arena = GradientArena(params)
        self._optimizer = StreamingAdamW(params, self._arena, settings)
        self._split = SplitModel(model_weights(hf_model))

    def step(self, prompts: Sequence[PromptInput], targets: Sequence[Sequence[int]]) -> SupervisedOutcome:
        """One update on a batch. Raises NonFiniteError, with nothing changed, for a loss that is not finite."""
        with torch.enable_grad():
            loss = self._split.supervised_loss(prompts, targets)
        value, rate = float(loss.detach()), self._optimizer.lr
        if not math.isfinite(value):
            raise NonFiniteError(f"the supervised loss is not finite: {value}")
        loss.backward()
        self._optimizer.step()
        self._arena.zero()
        return SupervisedOutcome(loss=value, grad_norm=self._optimizer.grad_norm, lr=rate)
