"""Peaks by phase, from the changes of residency."""

from __future__ import annotations

from typing import Any

import torch

from rollplex_cli.core.units import MIB
from rollplex_cli.memory.manager import MemoryManager
from rollplex_cli.memory.meter import CONTEXT, PYTORCH, PhaseMeter, heap_bytes, rss_bytes, trim_heap


def test_a_phase_has_the_peak_of_its_intervals_and_the_next_begins_with_what_is_left(driver: Any) -> None:
    # On a GPU its context, hundreds of MiB, counts.
    manager = MemoryManager(driver, budget_bytes=4096 * MIB, host_budget_bytes=0)
    meter = PhaseMeter(manager)
    for name, size in (("rollout_kv", 8), ("gradients", 6), ("snapshot", 2)):
        manager.region(name, size * MIB)

    def move(*names: str, out: bool = False) -> None:
        if out:
            manager.unmap(*names, after="a test")
        else:
            manager.map(*names)
        meter.changed()

    move("snapshot")
    move("rollout_kv")
    move("rollout_kv", out=True)
    move("gradients")
    first = meter.end_phase()
    outside = first.objects.get(PYTORCH, 0) + first.objects.get(CONTEXT, 0)
    assert {name: first.objects[name] for name in ("snapshot", "rollout_kv", "gradients")} == {
        "snapshot": 2 * MIB, "rollout_kv": 8 * MIB, "gradients": 6 * MIB,
    }  # fmt: skip
    assert 10 * MIB <= first.peak_bytes <= 10 * MIB + outside  # never all three at once
    assert first.regions == {"snapshot": 2 * MIB, "gradients": 6 * MIB}
    second = meter.end_phase()
    assert second.objects.get("rollout_kv") is None
    assert 8 * MIB <= second.peak_bytes <= 8 * MIB + outside
    assert meter.take_peaks()[1] >= 10 * MIB
    if driver.inner.device == "cpu":
        assert meter.take_peaks() == (8 * MIB, 8 * MIB)
    manager.close_region("gradients")
    manager.close_region("rollout_kv")
    manager.close_region("snapshot")


def test_the_heap_and_the_process_are_counted() -> None:
    trim_heap()  # else pages that earlier tests left free, which are resident already, may serve
    before, resident = heap_bytes(), rss_bytes()
    kept = torch.ones(8 * MIB)
    assert heap_bytes() - before >= 32 * MIB
    assert rss_bytes() - resident >= 24 * MIB
    del kept
    assert heap_bytes() - before < 8 * MIB


def test_what_the_heap_has_free_goes_back() -> None:
    """Blocks under the size that glibc maps singly, with every 50th kept: holes that it would keep."""
    blocks = [torch.ones(20_000) for _ in range(1_500)]
    kept = blocks[::50] + blocks[-1:]
    del blocks
    before = rss_bytes()
    trim_heap()
    assert rss_bytes() < before - 40 * MIB
    assert all(float(block[0]) == 1.0 for block in kept)
