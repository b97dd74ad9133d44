"""The reference scores like the policy it was copied from, and drops what it used."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollplex_cli.engines.reference.reference import Reference
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.trainer.split import SplitModel
from rollplex_cli.rl.packing import pack_suffix


def test_reference_equals_the_actor_with_equal_weights(tiny: Any) -> None:
    prompt, responses = tiny.prompt(2, [(2, 4, 8)]), tiny.responses(2, [4, 1, 3])
    packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
    options = {"temperature": 0.8, "banned_token_ids": tiny.banned}
    model = tiny.model()
    reference = Reference(model, **options)
    assert not any(param.requires_grad for param in model.parameters())
    state = reference.prefix(prompt)
    logprobs = reference.suffix(state, packed)
    policy = SplitModel(model_weights(tiny.model()), **options)
    expected = policy.suffix(policy.prefix(prompt, "keep"), packed)
    assert not logprobs.requires_grad
    assert torch.allclose(logprobs, expected, atol=1e-6)
    assert state.boundary_bytes == 0
    with pytest.raises(ValueError, match="consumed"):
        reference.suffix(state, packed)
