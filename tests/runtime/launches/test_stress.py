"""Collectives of both lanes on four ranks: one order in a replica, right sums, named hangs, woken lanes."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import warm

SCRIPT = Path(__file__).parent / "four_ranks.py"
REPLICAS = ((0, 2), (1, 3))
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(240)]


def run_four(mode: str, units: int, *more: str) -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = warm.run([[SCRIPT, rank, port, mode, units, *more] for rank in range(4)], timeout_s=200)
    return [json.loads(rank.stdout.strip().splitlines()[-1]) for rank in ranks]


def test_every_replica_launches_in_one_order() -> None:
    """Thousands of launches with random delays in both lanes. Replicas differ from each other, their ranks do not."""
    found = run_four("plain", 1000)
    assert [row["errors"] for row in found] == [[]] * 4
    for first, second in REPLICAS:
        assert found[first]["order"] == found[second]["order"]
        assert sorted(found[first]["order"]) == ["R"] * 1000 + ["T"] * 1000
        changes = sum(a != b for a, b in zip(found[first]["order"], found[first]["order"][1:], strict=False))
        assert changes > 200  # both lanes were at it at once
    assert found[0]["order"] != found[1]["order"]


def test_without_it_the_ranks_of_a_replica_differ() -> None:
    found = run_four("plain", 100, "--no-order")
    assert [row["errors"] for row in found] == [[]] * 4
    assert any(found[first]["order"] != found[second]["order"] for first, second in REPLICAS)


def test_a_hang_is_named() -> None:
    """Rank 1 stops before its 41st all-reduce; the others stand in it, or behind it in their order."""
    found = run_four("hang", 200)
    for rank in (0, 2, 3):
        line = next(line for line in found[rank]["lines"] if line.startswith("trainer lane"))
        assert "all_reduce #41 of the training group in actor_prefix[4], 4.0 KiB, begun" in line
        assert "rank 1 is at #40 in actor_prefix[3], finished" in line


def test_a_failure_wakes_whoever_waits_for_a_turn() -> None:
    """Rank 1 fails outside of any collective. Lanes that wait for their turn end; those in a collective of the dead
    rank cannot, and the process ends around them."""
    found = run_four("fail", 2000)
    assert found[1]["errors"][0] == "RuntimeError: injected"
    assert "StoppedError" in found[0]["errors"]  # decode stood behind the collective that rank 1 never came to
    assert "StoppedError" in found[2]["errors"]
    assert {state for row in found for state in row["stuck"]} <= {"launching"}
