"""What the memory plan says autograd keeps, against what it keeps."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollplex_cli.core.units import MIB
from rollplex_cli.engines.trainer.model.families.gather import model_weights
from rollplex_cli.engines.trainer.split import SplitModel
from rollplex_cli.plan.memory import MemoryInputs, activations
from rollplex_cli.plan.model import shape_from_config
from rollplex_cli.rl.packing import pack_suffix

LENGTHS = [96, 96, 96, 96]


def inputs_of(model: Any, prompt_tokens: int, **changes: Any) -> MemoryInputs:
    values = {
        "shape": shape_from_config("test", model.config.to_dict(), "the test's model"),
        "train_tp": 1, "rollout_tp": 1, "data_parallel": 1, "groups": 1, "prefixes_in_flight": 0,
        "group_size": len(LENGTHS), "max_prompt_tokens": prompt_tokens, "max_new_tokens": LENGTHS[0],
        "kv_tokens": 4096, "max_running_requests": 8, "chunked_prefill_tokens": 64, "bytes_per_value": 4,
        "has_reference": True, "overlap": True, "early_groups": False, "prefix_activations": "keep",
        "suffix_kept_layers": None, "freeze_vision": False, "chunk_elements": 64, "master": "full",
        "prompt_cache_bytes": 0, "on_gpu": False,
    }  # fmt: skip
    return MemoryInputs(**{**values, **changes})  # type: ignore[arg-type]


class Saved:
    """Bytes that autograd keeps, each storage once, without weights."""

    def __init__(self, model: Any, others: list[torch.Tensor]) -> None:
        self._not_counted = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *others]}
        self._found: dict[int, int] = {}
        # A freed storage's address may come again.
        self._alive: list[torch.Tensor] = []

    @property
    def num_bytes(self) -> int:
        return sum(self._found.values())

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._not_counted:
            self._found[storage.data_ptr()] = storage.nbytes()
            self._alive.append(tensor)
        return tensor


def suffix_bytes(tiny: Any, layers: int) -> tuple[int, MemoryInputs]:
    model = tiny.model(layers=layers)
    prompt = tiny.prompt(3, [(4, 8, 8)])
    packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, tiny.responses(3, LENGTHS))
    split = SplitModel(model_weights(model))
    state = split.prefix(prompt, "recompute")
    saved = Saved(model, [t for pair in state.boundary for t in pair])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        split.suffix(state, packed)
    return saved.num_bytes, inputs_of(model, prompt.num_tokens)


def test_a_decoder_layer_of_a_suffix(tiny: Any) -> None:
    fewer, _ = suffix_bytes(tiny, 2)
    more, inputs = suffix_bytes(tiny, 4)
    planned = inputs.suffix_rows * activations.decoder_layer(inputs).kept
    planned += inputs.suffix_rows * activations.joined_keys(inputs)
    assert (more - fewer) / 2 == pytest.approx(planned, rel=0.03)


def prefix_bytes(tiny: Any, **options: Any) -> tuple[int, MemoryInputs, Any]:
    model = tiny.model(window=56, **options)
    prompt = tiny.prompt(3, [(4, 32, 32)], words=8)
    saved = Saved(model, [m.patches for m in prompt.prompt.media])
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        SplitModel(model_weights(model)).prefix(prompt, "keep")
    return saved.num_bytes, inputs_of(model, prompt.num_tokens), prompt


def test_a_decoder_layer_of_a_prefix(tiny: Any) -> None:
    fewer, _, _ = prefix_bytes(tiny, layers=2)
    more, inputs, prompt = prefix_bytes(tiny, layers=4)
    assert (more - fewer) / 2 == pytest.approx(
        (prompt.num_tokens - 1) * activations.decoder_layer(inputs).kept, rel=0.03
    )


def test_a_kept_prefix_with_its_vision_tower(tiny: Any) -> None:
    measured, inputs, _ = prefix_bytes(tiny, layers=2)
    # The plan takes every token for media; a few here are words.
    assert measured == pytest.approx(activations.kept_prefix(inputs), rel=0.1), measured / MIB
