"""`optimizer.master`: a run in one mode goes on in the other, bit for bit."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from scenarios.support import go_on, small, train

from rollplex_cli.core.events import read_events
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.profile.dump import resolved_yaml
from rollplex_cli.profile.load import load_profile

if TYPE_CHECKING:
    from pathlib import Path

EXACT = ("step", "loss", "kl", "grad_norm", "reward_mean", "entropy", "logprob_diff_mean")
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(400)]


def overrides(prepared: RunFolder, *more: str) -> list[str]:
    # Random weights in BF16: the engines differ by more than a trained model's would.
    bf16 = ("model.dtype=bfloat16", "model.init=checkpoint", f"model.config={prepared.base_dir}", "optimizer.lr=1e-3")
    guards = ("guards.parity_limit=1.0", "guards.check_publish=true", "optimizer.chunk_elements=65536")
    saving = ("runtime.max_steps=4", "runtime.checkpoint_every=2", "runtime.keep_checkpoints=9")
    return [*bf16, *guards, *saving, *more]


def results(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: row[key] for key in EXACT} for row in rows]


def test_a_full_run_goes_on_split(prepared: RunFolder, tmp_path: Path) -> None:
    full, split = RunFolder(tmp_path / "full"), RunFolder(tmp_path / "split")
    expected = results(train(full.root, *overrides(prepared)))
    moved = [event for event in read_events(full.events(0)) if event["name"] == "optimizer"]
    assert [event["step"] for event in moved] == [1, 2, 3, 4]
    assert all(event["elements"] > 100_000 and event["t1"] > event["t0"] for event in moved)

    shutil.copytree(full.root, split.root)
    shutil.rmtree(split.checkpoints_dir / "step-000004")
    given = small(*overrides(prepared, "optimizer.master=split"))
    split.profile.write_text(resolved_yaml(load_profile("tiny", given)))
    assert results(go_on(split.root)) == expected
    weights = [sorted((run.checkpoints_dir / "step-000004").glob("part-*.safetensors")) for run in (full, split)]
    assert [path.name for path in weights[0]] == [path.name for path in weights[1]]
    assert [path.read_bytes() for path in weights[0]] == [path.read_bytes() for path in weights[1]]
