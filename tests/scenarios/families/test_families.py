"""The newer families train from prepared data to an exported checkpoint that transformers loads with equal weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollplex_cli.plan.model import load_shape

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def results(prepared: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script, folder = Path(__file__).parent / "train_and_export.py", tmp_path_factory.mktemp("families")
    done = subprocess.run(
        [sys.executable, str(script), str(prepared.root), str(folder)],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize("name", ["tiny-qwen2vl", "tiny-qwen3vl"])
def test_a_run_and_its_export(results: dict[str, Any], name: str) -> None:
    found, family = results[name], load_shape(name).family
    assert found["steps"] == [1, 2] and found["changed"]
    assert found["diff_max"] < 1e-4 and min(found["grad_norms"]) > 0
    assert (found["model_class"], found["processor_class"]) == (family.model_class, family.processor_class)
    assert found["num_weights"] > 30
    assert found["names_differ"] == [] and found["weights_differ"] == []
