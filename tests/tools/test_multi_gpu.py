"""The jobs of several GPUs plan here as their scripts run them."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from rollplex_cli.cli.bench import _halved
from rollplex_cli.core.units import GIB
from rollplex_cli.plan.build import Plan, build_plan
from rollplex_cli.plan.fit import Machine, memory_reasons
from rollplex_cli.profile.load import load_profile

ROOT = Path(__file__).parents[2]
CARD_80_GB, CARD_141_GB, HOST_GIB = 80e9, 141e9, 560


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; jobs are named relative to the checkout."""
    spec = importlib.util.spec_from_file_location("multi_gpu", ROOT / "tools" / "gpu" / "multi_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "multi_gpu", module)
    spec.loader.exec_module(module)
    return module


def values_of(command: tuple[str, ...], option: str) -> list[str]:
    return [value for name, value in itertools.pairwise(command) if name == option]


def plan_of(part: Any, *more: str) -> Plan:
    profile = str(ROOT / values_of(part.command, "--profile")[0])
    return build_plan(load_profile(profile, [*values_of(part.command, "--set"), *more]))


@pytest.mark.parametrize("job", ["x2", "x4", "x8"])
def test_every_part_fits_as_it_says(job: str, script: Any) -> None:
    parts = script.JOBS[job]()
    assert len({part.name for part in parts}) == len(parts) > 1
    for part in parts:
        plan = plan_of(part)
        assert bool(memory_reasons(plan, Machine())) == (part.ends_with == script.DOES_NOT_FIT), part.name
        if "disagg" in values_of(part.command, "--baseline"):
            profile = load_profile(str(ROOT / values_of(part.command, "--profile")[0]))
            assert not memory_reasons(plan_of(part, *_halved(profile)), Machine()), part.name


def test_the_shape_of_the_paper_on_eight_gpus() -> None:
    path = str(ROOT / "jobs" / "bench" / "h200x8_32b.yaml")
    plan = build_plan(load_profile(path))
    assert (plan.topology.train_tp, plan.topology.rollout_tp, plan.topology.num_ranks) == (8, 4, 8)
    assert plan.memory.peak_bytes < CARD_80_GB
    assert plan.memory.peak_bytes / plan.memory.naive_peak_bytes < 0.45
    assert plan.node_host_bytes < HOST_GIB * GIB
    large = build_plan(load_profile(path, ["memory.budget_gib=131", "schedule.suffix_kept_layers=null"]))
    assert CARD_80_GB < large.memory.peak_bytes < CARD_141_GB
    assert not memory_reasons(large, Machine())


def test_efficiency_of_a_window(script: Any) -> None:
    """Ten seconds of decode beside eight of training in fifteen."""
    rows = [
        {"variant": "rollplex", "phase_s": {"GENERATE": 15.0, "LEARN": 2.0}},
        {"variant": "colocate_same_work", "phase_s": {"GENERATE": 10.0, "LEARN": 10.0}},
    ]
    assert script.window_efficiency({"results": rows}) == 18 / 15
    assert script.window_efficiency({"results": rows[:1]}) is None
