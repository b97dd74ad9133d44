"""The run's own waits: each is watched."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollplex_cli.core.errors import StallError
from rollplex_cli.profile.load import load_profile
from rollplex_cli.runtime.control.control import Control
from rollplex_cli.runtime.control.peers import Peers
from rollplex_cli.runtime.executor.lanes import LaneThread
from rollplex_cli.runtime.executor.phases import PhaseMachine
from rollplex_cli.runtime.loop import Run


def test_a_file_that_never_answers_is_a_stall_that_names_the_data(tmp_path: Path) -> None:
    machine, lane, answer = PhaseMachine(), LaneThread("host"), threading.Event()
    control = Control(Peers(None, 0, 1), machine, tmp_path / "rank0.json", 0.3)
    rank = SimpleNamespace(
        profile=load_profile("tiny"), control=control, peers=control.peers, machine=machine, host_lane=lane,
        media_tokens=None, loader=SimpleNamespace(batch=lambda _step: answer.wait(3.0)),
    )  # fmt: skip
    try:
        with pytest.raises(StallError, match="control: the prompts of the step"):
            Run(rank)._step(1)  # type: ignore[arg-type]
    finally:
        answer.set()
        lane.close(5.0)
