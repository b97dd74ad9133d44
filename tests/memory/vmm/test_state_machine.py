"""Random sequences of reserve, create, map, alias, unmap, close, misuse and failures, against a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from rollplex_cli.memory.vmm.base import DriverCallError, OutOfMemoryError
from rollplex_cli.memory.vmm.space import Handle, LiveResources, Mapping, Reservation, VirtualMemory

MAX_UNITS = 4
FAULTS = (DriverCallError, OutOfMemoryError)


class VirtualMemoryMachine(RuleBasedStateMachine):
    """The model: which handle is at which address, and the byte that fills each handle."""

    def __init__(self, driver: Any) -> None:
        super().__init__()
        self.driver = driver
        self.memory = VirtualMemory(driver)
        self.unit = self.memory.granularity
        self.reservations: list[Reservation] = []
        self.handles: dict[Handle, int | None] = {}
        """Open or mapped handles with the byte they are filled with; None where nobody wrote yet."""
        self.mappings: list[Mapping] = []
        self.tensors: list[torch.Tensor] = []
        self.retired: list[tuple[Reservation, torch.Tensor]] = []
        self.next_byte = 0

    def attempt(self, action: Callable[[], object]) -> bool:
        """Run `action`; when a primitive fails, hold that nothing changed and tell so."""
        before = self.memory.live()
        accessible = [mapping.accessible for mapping in self.mappings]
        try:
            action()
        except FAULTS:
            self.driver.fail_in = 0
            assert self.memory.live() == before
            assert [mapping.accessible for mapping in self.mappings] == accessible
            assert not any(mapping.closed for mapping in self.mappings)
            return False
        return True

    @rule(in_calls=st.integers(1, 3))
    def arm_a_failure(self, in_calls: int) -> None:
        self.driver.fail_in, self.driver.fail_times = in_calls, 1

    @rule(units=st.integers(1, 3 * MAX_UNITS), power=st.integers(0, 3))
    def reserve(self, units: int, power: int) -> None:
        alignment = self.unit << power
        made: list[Reservation] = []
        if self.attempt(lambda: made.append(self.memory.reserve(units * self.unit, alignment))):
            assert made[0].address % alignment == 0
            assert made[0].size == units * self.unit
            self.reservations += made

    @rule(units=st.integers(1, MAX_UNITS))
    def create(self, units: int) -> None:
        made: list[Handle] = []
        if self.attempt(lambda: made.append(self.memory.create(units * self.unit, f"owner{units}"))):
            self.handles[made[0]] = None

    @precondition(lambda self: self.reservations and self.handles)
    @rule(data=st.data(), unit=st.integers(0, 3 * MAX_UNITS))
    def map(self, data: st.DataObject, unit: int) -> None:
        """Anywhere, also where it must not; a handle that is mapped already gets an alias."""
        reservation = data.draw(st.sampled_from(self.reservations))
        handle = data.draw(st.sampled_from(list(self.handles)))
        start, end = unit * self.unit, unit * self.unit + handle.size
        overlap = any(
            mapping.reservation is reservation and start < mapping.offset + mapping.size and mapping.offset < end
            for mapping in self.mappings
        )
        if handle.closed or overlap or end > reservation.size:
            before = self.memory.live()
            with pytest.raises(ValueError):
                self.memory.map(reservation, start, handle)
            assert self.memory.live() == before
            return
        made: list[Mapping] = []
        if self.attempt(lambda: made.append(self.memory.map(reservation, start, handle))):
            self.mappings += made

    @precondition(lambda self: self.mappings)
    @rule(data=st.data())
    def set_access(self, data: st.DataObject) -> None:
        mapping = data.draw(st.sampled_from(self.mappings))
        if self.attempt(lambda: self.memory.set_access(mapping.reservation, mapping.offset, mapping.size)):
            assert mapping.accessible

    @precondition(lambda self: any(mapping.accessible for mapping in self.mappings))
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        mapping = data.draw(st.sampled_from([mapping for mapping in self.mappings if mapping.accessible]))
        if self.handles[mapping.handle] is None and self.driver.zeroes_new_memory:
            assert self.bytes_of(mapping).eq(0).all()
        self.next_byte = self.next_byte % 255 + 1
        self.bytes_of(mapping).fill_(self.next_byte)
        self.handles[mapping.handle] = self.next_byte

    @precondition(lambda self: self.mappings)
    @rule(data=st.data())
    def unmap(self, data: st.DataObject) -> None:
        mapping = data.draw(st.sampled_from(self.mappings))
        if self.attempt(mapping.close):
            self.mappings.remove(mapping)
            self.forget_unused(mapping.handle)

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def close_handle(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(list(self.handles)))
        handle.close()
        handle.close()
        self.forget_unused(handle)

    @precondition(lambda self: any(mapping.accessible for mapping in self.mappings))
    @rule(data=st.data())
    def keep_a_tensor(self, data: st.DataObject) -> None:
        mapping = data.draw(st.sampled_from([mapping for mapping in self.mappings if mapping.accessible]))
        self.tensors.append(self.bytes_of(mapping))

    @precondition(lambda self: self.tensors)
    @rule()
    def drop_tensors(self) -> None:
        self.tensors.clear()

    @precondition(lambda self: self.reservations)
    @rule(data=st.data())
    def close_reservation(self, data: st.DataObject) -> None:
        reservation = data.draw(st.sampled_from(self.reservations))
        if any(mapping.reservation is reservation for mapping in self.mappings):
            with pytest.raises(ValueError):
                reservation.close()
        elif self.attempt(reservation.close):
            reservation.close()
            self.reservations.remove(reservation)

    @invariant()
    def counts_agree(self) -> None:
        """Model = owning objects = ledger = what passed through the driver."""
        failure, self.driver.fail_in = self.driver.fail_in, 0
        live = self.memory.live()
        created = sum(handle.size for handle in self.handles)
        assert live.created_bytes == self.driver.created_bytes == self.memory.ledger.total_bytes == created
        assert (live.handles, live.mappings) == (len(self.handles), len(self.mappings))
        assert live.mapped_bytes == sum(mapping.size for mapping in self.mappings)
        assert live.reservations - live.retired == len(self.reservations)
        assert live.retired == 0 or self.tensors
        owners: dict[str, int] = {}
        for handle in self.handles:
            owners[handle.owner] = owners.get(handle.owner, 0) + handle.size
        assert self.memory.ledger.snapshot().by_owner == owners
        self.driver.fail_in = failure

    @invariant()
    def every_address_of_a_handle_shows_its_bytes(self) -> None:
        for mapping in self.mappings:
            byte = self.handles[mapping.handle]
            if mapping.accessible and byte is not None:
                shown = self.bytes_of(mapping)
                assert shown[0] == shown[-1] == byte
                assert shown.eq(byte).all()

    def bytes_of(self, mapping: Mapping) -> torch.Tensor:
        return mapping.reservation.tensor(mapping.offset, (mapping.size,), torch.uint8)

    def forget_unused(self, handle: Handle) -> None:
        if handle.closed and not any(mapping.handle is handle for mapping in self.mappings):
            self.handles.pop(handle, None)

    def teardown(self) -> None:
        self.driver.fail_in = 0
        for mapping in self.mappings:
            mapping.close()
        for handle in self.handles:
            handle.close()
        for reservation in self.reservations:
            reservation.close()
        self.tensors.clear()
        assert self.memory.live() == LiveResources()
        assert self.driver.created_bytes == 0


def test_random_sequences_keep_every_rule(driver: Any) -> None:
    run_state_machine_as_test(
        lambda: VirtualMemoryMachine(driver),
        settings=settings(
            max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
