"""Loggers: one interface, real TensorBoard and offline Weights & Biases files, and no fault that ends a run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.profile.load import load_profile
from rollplex_cli.runtime.output.loggers import JsonlLogger, Loggers, open_loggers, scalars

if TYPE_CHECKING:
    from collections.abc import Mapping

ROW = {"step": 3, "reward_mean": 0.5, "phase_s": {"LEARN": 1.25, "UPDATE": 2}, "note": "text", "done": True}


def test_scalars_are_numbers_with_their_path() -> None:
    assert dict(scalars(ROW)) == {"reward_mean": 0.5, "phase_s/LEARN": 1.25, "phase_s/UPDATE": 2.0, "done": 1.0}


def test_tensorboard_files_hold_every_figure(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = RunFolder(tmp_path)
    loggers = open_loggers(load_profile("tiny", ["logging.tensorboard=true"]), run, 1)
    loggers.step(ROW)
    loggers.evaluation({"step": 3, "heldout_reward": 0.75})
    loggers.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/phase_s/LEARN")] == [(3, 1.25)]
    assert [(e.step, e.value) for e in events.Scalars("evaluation/heldout_reward")] == [(3, 0.75)]
    assert json.loads(run.metrics.read_text()) == ROW
    assert json.loads(run.evaluations.read_text())["heldout_reward"] == 0.75


OFFLINE = """
import sys
from pathlib import Path
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.profile.load import load_profile
from rollplex_cli.runtime.output.loggers import open_loggers
for first in (1, 2):
    loggers = open_loggers(load_profile("tiny", ["logging.wandb=offline"]), RunFolder(Path(sys.argv[1])), first)
    loggers.step({"step": first, "reward_mean": 0.25 * first})
    assert loggers._copies, "the logger did not open or stopped"
    loggers.close()
"""


@pytest.mark.scenario
def test_wandb_offline_writes_files_and_sends_nothing(tmp_path: Path) -> None:
    # No proxy and no credentials: whatever it tried to send would fail loudly.
    done = subprocess.run(
        [sys.executable, "-c", OFFLINE, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    records = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(records) == 2
    assert len({path.name.split("-")[1] for path in records}) == 1  # a resumed run is the same run
    assert all(b"train/reward_mean" in path.read_bytes() for path in records)


class Broken:
    def __init__(self) -> None:
        self.calls = 0

    def step(self, row: Mapping[str, Any]) -> None:
        self.calls += 1
        raise OSError("disk full")

    def evaluation(self, row: Mapping[str, Any]) -> None:
        raise AssertionError("it ended with the first fault")

    def close(self) -> None:
        raise AssertionError("it ended with the first fault")


def test_a_copy_that_fails_ends_alone(tmp_path: Path) -> None:
    broken, run = Broken(), RunFolder(tmp_path)
    loggers = Loggers(JsonlLogger(run.metrics, run.evaluations), [broken])
    for _ in range(2):
        loggers.step(ROW)
    loggers.evaluation(ROW)
    loggers.close()
    assert broken.calls == 1
    assert len(run.metrics.read_text().splitlines()) == 2


def test_the_record_does_not_fail_in_silence(tmp_path: Path) -> None:
    loggers = Loggers(JsonlLogger(tmp_path / "none" / "metrics.jsonl", tmp_path / "evaluations.jsonl"), [])
    with pytest.raises(OSError, match="No such file"):
        loggers.step(ROW)
