"""The cold start's trainer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollplex_cli.core.errors import NonFiniteError
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.engines.trainer.supervised import SupervisedTrainer


def test_it_learns_one_batch_and_repeats_itself(tiny: Any) -> None:
    prompts = [tiny.prompt(seed, [(1, 4, 4)]) for seed in range(3)]
    targets = tiny.responses(1, [3, 2, 4])
    losses = []
    for _ in range(2):
        trainer = SupervisedTrainer(tiny.model(), AdamWSettings(lr=3e-3, warmup_steps=2))
        losses.append([trainer.step(prompts, targets).loss for _ in range(12)])
    assert losses[0] == losses[1]
    assert losses[0][-1] < 0.2 * losses[0][0]


def test_a_loss_that_is_not_finite_changes_nothing(tiny: Any) -> None:
    model = tiny.model()
    trainer = SupervisedTrainer(model, AdamWSettings(lr=1e-3))
    with torch.no_grad():
        model.model.language_model.norm.weight[0] = float("nan")
    before = model.lm_head.weight.detach().clone()
    with pytest.raises(NonFiniteError, match="supervised loss"):
        trainer.step([tiny.prompt(0, [])], [[1, 2]])
    assert torch.equal(model.lm_head.weight, before)
