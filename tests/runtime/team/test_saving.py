"""Optimizer state through a checkpoint: written in shares by the ranks of two shards, read as one, and back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rollplex_cli.engines.trainer.adamw.ranges import DataParallel
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings
from rollplex_cli.engines.trainer.adamw.state import STATE_PARTS
from rollplex_cli.engines.trainer.adamw.streaming import StreamingAdamW
from rollplex_cli.engines.trainer.arena import GradientArena
from rollplex_cli.engines.weights.shards import Box
from rollplex_cli.runtime import checkpoint
from rollplex_cli.runtime.team import saving

if TYPE_CHECKING:
    from pathlib import Path

FULL = {"w": (37, 10), "stack": (3, 4, 23), "norm": (130,)}
WHOLE = {name: Box.whole(shape) for name, shape in FULL.items()}
SHARDS = (
    {"w": Box((0, 0), (37, 5)), "stack": Box((0, 0, 0), (3, 2, 23)), "norm": Box((0,), (130,))},
    {"w": Box((0, 5), (37, 5)), "stack": Box((0, 2, 0), (3, 2, 23)), "norm": Box((0,), (130,))},
)
"""Columns, rows of the second axis, and a parameter that both hold."""


def plan_of(boxes: dict[str, Box], *, first: bool) -> Any:
    placements = {
        name: SimpleNamespace(tensor=f"hf.{name}", full=FULL[name], box=box, primary=first or box != WHOLE[name])
        for name, box in boxes.items()
    }
    return SimpleNamespace(placements=placements)


def optimizer_of(boxes: dict[str, Box], master: Any, share: DataParallel, state: dict[str, torch.Tensor]) -> Any:
    """One with the boxes of a state."""
    params = {name: torch.nn.Parameter(torch.zeros(box.shape, dtype=torch.bfloat16)) for name, box in boxes.items()}
    options = AdamWSettings(lr=1, master=master, chunk_elements=128)
    optimizer = StreamingAdamW(params, GradientArena(params), options, data_parallel=share)
    # Without the exchange between ranks, which a single process has not: every rank is given the weights of all.
    optimizer.share_weights = lambda: None  # type: ignore[method-assign]
    optimizer.restore(3, lambda part, name, box: state[f"{part}/{name}"][box.moved(boxes[name].offset).slices()])
    return optimizer


@pytest.mark.parametrize("master", ["full", "split"])
def test_every_element_is_written_once_and_read_in_any_shape(tmp_path: Path, master: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {f"{part}/{name}": torch.randn(s, generator=generator) for part in STATE_PARTS for name, s in FULL.items()}
    checkpoint.begin(tmp_path, 7)
    files: dict[str, int] = {}
    for group in range(3):
        for shard, boxes in enumerate(SHARDS):
            optimizer = optimizer_of(boxes, master, DataParallel(3, group), state)
            actor = SimpleNamespace(optimizer_parts=optimizer.parts)
            entries = saving.owned_entries(actor, plan_of(boxes, first=shard == 0))  # type: ignore[arg-type]
            files |= checkpoint.write(tmp_path, 7, 2 * group + shard, entries)
    checkpoint.commit(tmp_path, 7, files, {"updates": 3}, keep=1)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.shapes() == {f"{part}/hf.{name}": shape for part in STATE_PARTS for name, shape in FULL.items()}
    stored = sum(box.box.numel for boxes in found._index.values() for box in boxes)
    assert stored == sum(value.numel() for value in state.values())
    for part in STATE_PARTS:
        for name in FULL:
            assert torch.equal(found.read(f"{part}/hf.{name}"), state[f"{part}/{name}"]), (part, name)

    params = {name: torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16)) for name, shape in FULL.items()}
    resumed = StreamingAdamW(params, GradientArena(params), AdamWSettings(lr=1, master=master))
    rank = SimpleNamespace(plan=plan_of(WHOLE, first=True), engines=SimpleNamespace(actor=resumed))
    saving.load(rank, found)  # type: ignore[arg-type]
    again = resumed.state_dict()
    assert int(again.pop("updates")) == 3
    assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)
