"""Collectives in every task, two ranks, random delays: one order, no deadlock, one reason for a failure."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import warm

SCRIPT = Path(__file__).parent / "two_ranks.py"


def run_both(mode: str, seed: int) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = warm.run([[SCRIPT, rank, port, mode, seed] for rank in (0, 1)], timeout_s=90)
    return [json.loads(rank.stdout.strip().splitlines()[-1]) for rank in ranks]


@pytest.mark.scenario
@pytest.mark.parametrize("seed", [0, 1])
def test_followers_run_the_leaders_order(seed: int) -> None:
    first, second = run_both("plain", seed)
    assert first == second
    trained = [name for name in first["order"] if name.startswith("actor_suffix")]
    assert len(trained) == 6
    assert len(first["order"]) == 6 * 6 + 1


@pytest.mark.scenario
def test_a_skipped_group_is_skipped_everywhere() -> None:
    first, second = run_both("skip", 2)
    assert first == second
    assert "actor_suffix[3]" not in first["order"]
    assert "actor_suffix[2]" in first["order"]
    assert first["order"][-1] == "update"


@pytest.mark.scenario
def test_a_failure_surfaces_on_every_rank_with_its_reason() -> None:
    first, second = run_both("fail", 3)
    assert first["error"] == "PeerFailedError: rank 1 failed: injected at actor_suffix[2] of rank 1"
    assert second["error"] == "RuntimeError: injected at actor_suffix[2] of rank 1"
    assert first["s"] < 30
