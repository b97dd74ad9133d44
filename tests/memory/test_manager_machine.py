"""Random sequences of sets of regions that move, with failures at any primitive, against a model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import hypothesis.strategies as st
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rollplex_cli.core.errors import RollplexError
from rollplex_cli.memory import crash
from rollplex_cli.memory.manager import MemoryManager
from rollplex_cli.memory.pinned import PinnedBuffer
from rollplex_cli.memory.regions import Content, RegionError, RegionState
from rollplex_cli.memory.vmm.space import LiveResources

NAMES = ("weights", "rollout_kv", "reference", "gradients")
BUDGET_UNITS, HOST_UNITS = 24, 16
KEPT = (Content.SAVED, Content.CONSTANT)


class ManagerMachine(RuleBasedStateMachine):
    """The model: state and bytes of each region, reports, pinned buffers."""

    def __init__(self, driver: Any) -> None:
        super().__init__()
        self.driver = driver
        self.unit = driver.granularity
        self.manager = MemoryManager(
            driver, budget_bytes=BUDGET_UNITS * self.unit, host_budget_bytes=HOST_UNITS * self.unit
        )
        self.content: dict[str, Content] = {}
        self.mapped: set[str] = set()
        self.byte: dict[str, int | None] = {}
        """What fills each region, None where it is undefined."""
        self.frozen: set[str] = set()
        """CONSTANT regions that were unmapped once: nobody writes them any more."""
        self.torch_bytes = 0
        self.manager.report("torch", lambda: self.torch_bytes)
        self.pinned: list[PinnedBuffer] = []
        self.next_byte = 0

    def facts(self) -> object:
        """All that a failed operation must not change."""
        regions = self.manager._regions
        return (
            self.manager.memory.live(),
            replace(self.manager.usage(), driver_used_bytes=0),  # other processes and PyTorch move it
            {name: (region.state, region.address, region.slots) for name, region in regions.items()},
            sorted(crash.unmapped_ranges()),
        )

    def attempt(self, action: Callable[[], object], *, legal: bool) -> bool:
        before = self.facts()
        try:
            action()
        except (RegionError, ValueError):
            assert not legal
        except RollplexError:
            pass
        else:
            assert legal
            return True
        self.driver.fail_in = 0
        assert self.facts() == before
        return False

    @rule(in_calls=st.integers(1, 12))
    def arm_a_failure(self, in_calls: int) -> None:
        self.driver.fail_in, self.driver.fail_times = in_calls, 1

    @rule(name=st.sampled_from(NAMES), size=st.integers(1, 10), content=st.sampled_from(list(Content)))
    def make(self, name: str, size: int, content: Content) -> None:
        def action() -> None:
            self.manager.region(name, size * self.unit, content=content, handle_bytes=4 * self.unit)

        if self.attempt(action, legal=name not in self.content):
            region = self.manager.get(name)
            region.place("all", (region.size_bytes,), torch.uint8)
            self.content[name] = content
            self.byte[name] = None

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def map(self, data: st.DataObject) -> None:
        names = self.draw_names(data)
        wanted = sum(self.manager.get(name).size_bytes for name in names)
        fits = wanted <= self.manager.usage().free_bytes
        if self.attempt(lambda: self.manager.map(*names), legal=self.distinct(names) and not self.mapped & set(names)):
            assert fits
            self.mapped |= set(names)
            for name in names:
                if self.content[name] is Content.ZEROED:
                    self.byte[name] = 0

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def unmap(self, data: st.DataObject) -> None:
        names = self.draw_names(data)
        legal = self.distinct(names) and set(names) <= self.mapped
        if self.attempt(lambda: self.manager.unmap(*names, after="a task"), legal=legal):
            self.mapped -= set(names)
            for name in names:
                if self.content[name] not in KEPT:
                    self.byte[name] = None
                elif self.content[name] is Content.CONSTANT:
                    self.frozen.add(name)

    @precondition(lambda self: self.mapped)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.mapped)))
        if name not in self.frozen:
            self.next_byte = self.next_byte % 255 + 1
            self.manager.get(name).tensor("all").fill_(self.next_byte)
            self.byte[name] = self.next_byte

    @rule(size=st.integers(0, 26))
    def torch_grows_or_shrinks(self, size: int) -> None:
        self.torch_bytes = size * self.unit

    @rule(size=st.integers(1, 9))
    def pin(self, size: int) -> None:
        made: list[PinnedBuffer] = []
        if self.attempt(lambda: made.append(self.manager.host.allocate("masters", size * self.unit)), legal=True):
            self.pinned += made

    @precondition(lambda self: self.pinned)
    @rule()
    def unpin(self) -> None:
        if self.attempt(self.pinned[-1].close, legal=True):
            self.pinned.pop()

    @precondition(lambda self: self.content)
    @rule(data=st.data())
    def close_region(self, data: st.DataObject) -> None:
        """Failures in closing are tested one by one: what is gone cannot come back."""
        self.driver.fail_in = 0
        name = data.draw(st.sampled_from(sorted(self.content)))
        self.manager.close_region(name)
        del self.content[name], self.byte[name]
        self.mapped.discard(name)
        self.frozen.discard(name)

    @invariant()
    def every_count_agrees(self) -> None:
        failure, self.driver.fail_in = self.driver.fail_in, 0
        sizes = {name: self.manager.get(name).size_bytes for name in self.mapped}
        usage = self.manager.usage()
        self.manager.check()
        assert usage.regions == sizes
        assert self.driver.created_bytes == self.manager.memory.live().created_bytes == sum(sizes.values())
        assert usage.used_bytes == sum(sizes.values()) + self.torch_bytes
        masters = sum(buffer.num_bytes for buffer in self.pinned)
        assert usage.pinned.get("masters", 0) == masters
        assert sum(usage.pinned.values()) <= self.manager.host.budget_bytes
        assert {entry.region for entry in crash.unmapped_ranges()} == set(self.content) - self.mapped
        self.driver.fail_in = failure

    @invariant()
    def mapped_regions_hold_their_bytes(self) -> None:
        for name in self.content:
            region = self.manager.get(name)
            assert region.state is (RegionState.MAPPED if name in self.mapped else RegionState.UNMAPPED)
            if name in self.mapped and self.byte[name] is not None:
                assert region.tensor("all").eq(self.byte[name]).all()

    def draw_names(self, data: st.DataObject) -> list[str]:
        return data.draw(st.lists(st.sampled_from(sorted(self.content)), min_size=1, max_size=3))

    @staticmethod
    def distinct(names: list[str]) -> bool:
        return len(set(names)) == len(names)

    def teardown(self) -> None:
        self.driver.fail_in = 0
        for buffer in self.pinned:
            buffer.close()
        for name in list(self.content):
            self.manager.close_region(name)
        assert self.manager.memory.live() == LiveResources()
        assert self.manager.host.held_bytes == 0
        assert self.driver.created_bytes == 0


def test_random_sequences_keep_every_count_and_a_failure_changes_nothing(driver: Any) -> None:
    run_state_machine_as_test(
        lambda: ManagerMachine(driver),
        settings=settings(
            max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
