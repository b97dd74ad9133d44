"""What a step reports when its rollout breaks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from rollplex_cli.core.errors import NonFiniteError
from rollplex_cli.core.events import EventWriter
from rollplex_cli.core.units import MIB
from rollplex_cli.memory.leases import ObjectStore
from rollplex_cli.memory.manager import MemoryManager
from rollplex_cli.memory.residency import Residency
from rollplex_cli.memory.vmm.host import HostDriver
from rollplex_cli.profile.load import load_profile
from rollplex_cli.runtime.executor.theta import ThetaGuard
from rollplex_cli.runtime.launches.build import build_launches
from rollplex_cli.runtime.tasks import StepTasks

if TYPE_CHECKING:
    from pathlib import Path


class BrokenEngine:
    """Its step fails, and so does the clean-up after it, as a response whose log-probs are NaN makes both."""

    def begin_step(self) -> None: ...

    def submit(self, _requests: Any) -> None: ...

    def has_work(self) -> bool:
        return True

    def step(self) -> None:
        raise NonFiniteError("a sampled log-prob is not finite, group 0, response: 1")

    def abort(self) -> None:
        raise KeyError("0.1.1")


class AloneTeam:
    """The part of a training group of one rank that decoding uses."""

    responses = None
    launches = build_launches(None, on_device=False)
    board = SimpleNamespace(begin_step=lambda _step, _num_groups: None, complete=False)

    def own_groups(self, groups: Any) -> list[int]:
        return list(groups)


class Failures:
    """The part of an executor that is told of failures."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    def begin_decodes(self, _keys: Any) -> None: ...

    def fail(self, error: BaseException) -> None:
        self.errors.append(error)


def test_the_first_reason_survives_a_clean_up_that_fails(tmp_path: Path) -> None:
    prompt = SimpleNamespace(prompt=SimpleNamespace(sample=SimpleNamespace(sample_id="s")))
    events = EventWriter(tmp_path / "events.jsonl", 0)
    residency = Residency(MemoryManager(HostDriver(MIB), budget_bytes=MIB, host_budget_bytes=0))
    residency.place("rollout_kv", {"k0": ((16,), torch.float32)})
    tasks = StepTasks(
        load_profile("tiny"), SimpleNamespace(rollout=BrokenEngine()), ObjectStore(), ThetaGuard(),  # type: ignore[arg-type]
        events, residency, team=AloneTeam(), step=1, first_group=0, inputs={0: prompt},  # type: ignore[arg-type,dict-item]
    )  # fmt: skip
    executor = Failures()
    with pytest.raises(NonFiniteError):
        tasks.run_rollout(executor)  # type: ignore[arg-type]
    events.close()
    residency.close()
    assert [type(e) for e in executor.errors] == [NonFiniteError]
