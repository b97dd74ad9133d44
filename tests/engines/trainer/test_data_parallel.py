"""Two gloo ranks train what one rank trains with all groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines.spawn import run_ranks

WORKER = Path(__file__).with_name("dp_worker.py")


def train(folder: Path, world: int) -> list[dict[str, Any]]:
    folder.mkdir()
    outputs = [folder / f"rank{rank}.pt" for rank in range(world)]
    run_ranks(
        world,
        lambda rank: [str(WORKER), str(rank), str(world), str(folder / "store"), str(outputs[rank])],
        timeout_s=120,
    )
    return [torch.load(output, weights_only=True) for output in outputs]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one rank gives."""
    return train(tmp_path_factory.mktemp("single") / "one", 1)[0]


@pytest.mark.scenario
def test_two_ranks_equal_one(single: dict[str, Any], tmp_path: Path) -> None:
    first, second = train(tmp_path / "two", 2)
    assert first["norms"] == second["norms"]
    assert all(torch.equal(value, second["params"][name]) for name, value in first["params"].items())
    assert all(torch.equal(value, second["state"][name]) for name, value in first["state"].items())
    assert first["norms"] == pytest.approx(single["norms"], rel=1e-4)
    for name, value in single["first"].items():
        if name.startswith("exp_avg/"):
            # After one update the first moment is a tenth of the gradient.
            assert (value - first["first"][name]).abs().max() < 1e-7, name
            assert value.abs().max() > 1e-4, name


@pytest.mark.scenario
def test_one_rank_repeats_itself(single: dict[str, Any], tmp_path: Path) -> None:
    (again,) = train(tmp_path / "again", 1)
    assert all(torch.equal(value, again["state"][name]) for name, value in single["state"].items())
