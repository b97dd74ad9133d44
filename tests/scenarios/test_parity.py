"""Both engines compute the same log-probs of the same tokens, from the same weights and positions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from scenarios.support import prepare_run, run_script

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder


@pytest.mark.scenario
def test_rollout_and_trainer_agree_on_text_and_video(prepared: RunFolder, tmp_path: Path) -> None:
    run = prepare_run(tmp_path / "run", prepared)
    script = Path(__file__).parent / "parity.py"
    figures, _ = run_script(script, run.root, tmp_path, timeout_s=200)
    assert [f["videos"] for f in figures.values()] == [0, 1, 1, 2, 2]
    # Two frames to a temporal step: at 6 fps a third of a second, which a truncated interval would turn into 0.
    assert figures["one video, 6 fps"]["seconds_per_grid"] == [pytest.approx(1 / 3)]
    for name, figure in figures.items():
        assert figure["tokens"] == 4 * 24
        assert figure["mean"] < 1e-5, name
        assert figure["max"] < 1e-4, name
