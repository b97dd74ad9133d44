"""The newer families train from prepared data to an exported checkpoint that transformers loads with equal weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from scenarios.support import run_script

from rollplex_cli.plan.model import load_shape

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def results(prepared: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script, folder = Path(__file__).parent / "train_and_export.py", tmp_path_factory.mktemp("families")
    return run_script(script, prepared.root, folder)[0]


@pytest.mark.parametrize("name", ["tiny-qwen2vl", "tiny-qwen3vl"])
def test_a_run_and_its_export(results: dict[str, Any], name: str) -> None:
    found, family = results[name], load_shape(name).family
    assert found["steps"] == [1, 2] and found["changed"]
    assert found["diff_max"] < 1e-4 and min(found["grad_norms"]) > 0
    assert (found["model_class"], found["processor_class"]) == (family.model_class, family.processor_class)
    assert found["num_weights"] > 30
    assert found["names_differ"] == [] and found["weights_differ"] == []
