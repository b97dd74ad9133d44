"""Small run folders with real files, as a run of the tiny profile leaves them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollplex_cli.core.paths import RunFolder

ROOT = Path(__file__).parents[2]


def metric_row(step: int, num_steps: int, *, kl: bool = True) -> dict[str, Any]:
    """One plausible row of metrics.jsonl whose reward climbs from 0.55 to 0.95."""
    noise = random.Random(step)
    reward = 0.55 + 0.4 * step / num_steps + noise.uniform(-0.04, 0.04)
    row = {
        "step": step,
        "reward_mean": min(1.0, reward),
        "reward_std": 0.4 - 0.25 * step / num_steps,
        "loss": noise.uniform(-0.01, 0.01),
        "grad_norm": noise.uniform(0.6, 1.8),
        "lr": 5e-4,
        "logprob_diff_mean": noise.uniform(1e-7, 9e-7),
        "logprob_diff_max": noise.uniform(1e-6, 9e-6),
        "response_tokens_mean": 6.0 + noise.uniform(-0.2, 0.2),
        "entropy": 0.3 * (1 - step / num_steps) + 0.05,
        "reward_parts_earned": {"format": 0.98},
        "exact_mean": reward,
        "zero_variance_share": 0.2 + 0.6 * step / num_steps,
        "clip_fraction": 0.0,
        "step_s": 0.9 + noise.uniform(-0.05, 0.05),
        "phase_s": {"GENERATE": 0.4, "LEARN": 0.35, "UPDATE": 0.06, "PUBLISH": 0.01},
        "data_wait_s": 0.0,
    }
    if kl:
        row["kl"] = 0.002 * step
    return row


def step_events(step: int, t0: float, schedule: str, groups: int = 8) -> list[dict[str, Any]]:
    """Spans of one step: prefixes beside the decode (`rollplex`) or all after it (`colocate`)."""
    events: list[dict[str, Any]] = []

    def add(name: str, start: float, length: float, phase: str, lane: str, group: int | None = None) -> float:
        row = {"name": name, "t0": t0 + start, "t1": t0 + start + length, "step": step, "phase": phase, "lane": lane}
        events.append({**row, "group": group, "rank": 0})
        return start + length

    decode_end = 0.0
    for group in range(groups):
        decode_end = max(decode_end, add("decode", 0.0, 0.3 + 0.02 * group, "GENERATE", "rollout", group))
    for group in range(groups):
        add("reward", 0.3 + 0.02 * group, 0.004, "GENERATE", "host", group)
        add("advantage", 0.305 + 0.02 * group, 0.001, "GENERATE", "host", group)
    clock = 0.0 if schedule == "rollplex" else decode_end
    for name, length in (("ref_prefix", 0.015), ("actor_prefix", 0.03)):
        for group in range(groups):
            clock = add(name, clock, length, "GENERATE" if clock < decode_end else "LEARN", "trainer", group)
    clock = learn = max(clock, decode_end)
    for name, length in (("ref_suffix", 0.006), ("actor_suffix", 0.02), ("actor_prefix_backward", 0.03)):
        for group in range(groups):
            clock = add(name, clock, length, "LEARN", "trainer", group)
    updated = add("update", clock, 0.05, "UPDATE", "trainer")
    published = add("publish", updated, 0.01, "PUBLISH", "rollout")
    add("phase", 0.0, learn, "GENERATE", "control")
    add("phase", learn, clock - learn, "LEARN", "control")
    add("phase", clock, updated - clock, "UPDATE", "control")
    add("phase", updated, published - updated, "PUBLISH", "control")
    return events


def append_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows as a run does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows)


MakeRun = Callable[..., RunFolder]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Writes a run folder: `num_steps` rows, events of both schedules where `both`, evaluations at the ends."""

    number = itertools.count()

    def make(num_steps: int = 30, *, kl: bool = True, both: bool = False, profile: bool = True) -> RunFolder:
        folder = RunFolder(tmp_path / str(next(number)) / "run")
        folder.make()
        folder.plan.write_text('{"tasks": {"per_rank": {"decode": 8, "actor_suffix": 9}}}', encoding="utf-8")
        if profile:
            folder.profile.write_text((ROOT / "profiles" / "tiny.yaml").read_text(encoding="utf-8"), encoding="utf-8")
        rows = [metric_row(step, num_steps, kl=kl) for step in range(1, num_steps + 1)]
        schedules = ["colocate", "rollplex"] if both else ["rollplex"]
        for row in rows if both else []:
            row["schedule"] = schedules[row["step"] % len(schedules)]
        append_jsonl(folder.metrics, rows)
        if rows:
            evaluations = [(0, 0.58), (num_steps, 0.97)]
            append_jsonl(
                folder.evaluations,
                [{"step": step, "heldout_accuracy": value, "num_samples": 96} for step, value in evaluations],
            )
        for row in rows[:8]:
            events = step_events(row["step"], 1.7e9 + 2.0 * row["step"], schedules[row["step"] % len(schedules)])
            append_jsonl(folder.events(0), events)
        return folder

    return make


@pytest.fixture(name="append")
def append_fixture() -> Callable[..., None]:
    """Appends rows to a file of JSON lines."""
    return append_jsonl


@pytest.fixture(name="metric_row")
def metric_row_fixture() -> Callable[..., dict[str, Any]]:
    """One plausible row of metrics."""
    return metric_row
