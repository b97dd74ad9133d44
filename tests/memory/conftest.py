"""Both drivers, with a switch that makes a chosen primitive fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from rollplex_cli.core.units import MIB
from rollplex_cli.memory import crash
from rollplex_cli.memory.vmm import open_driver
from rollplex_cli.memory.vmm.base import DriverCallError, MemoryDriver, OutOfMemoryError

CAPACITY_BYTES = 256 * MIB


class FlakyDriver:
    """A real driver that counts what passes through and fails on demand, before doing anything.

    `created_bytes` is the independent count that ledgers are compared with.
    """

    def __init__(self, inner: MemoryDriver) -> None:
        self.inner = inner
        self.created_bytes = 0
        self.calls: Counter[str] = Counter()
        self.fail_in = 0
        """Fail the n-th primitive from now on; 0 fails none."""
        self.fail_times = 1
        """How many primitives in a row fail once the first one did."""
        self.failing: frozenset[str] = frozenset()
        """Primitives that always fail."""

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def _enter(self, name: str) -> None:
        self.calls[name] += 1
        if self.fail_in:
            self.fail_in -= 1
            if self.fail_in == 0:
                self.fail_times -= 1
                self.fail_in = 1 if self.fail_times else 0
                self._fail(name)
        if name in self.failing:
            self._fail(name)

    @staticmethod
    def _fail(name: str) -> None:
        if name == "create":
            raise OutOfMemoryError("a handle", wanted_bytes=1, free_bytes=0)
        raise DriverCallError(name, "injected")

    def reserve(self, size: int, alignment: int) -> int:
        self._enter("reserve")
        return self.inner.reserve(size, alignment)

    def free(self, address: int, size: int) -> None:
        self._enter("free")
        self.inner.free(address, size)

    def create(self, size: int) -> int:
        self._enter("create")
        handle = self.inner.create(size)
        self.created_bytes += size
        return handle

    def release(self, handle: int, size: int) -> None:
        self._enter("release")
        self.inner.release(handle, size)
        self.created_bytes -= size

    def map(self, address: int, size: int, handle: int) -> None:
        self._enter("map")
        self.inner.map(address, size, handle)

    def set_access(self, address: int, size: int) -> None:
        self._enter("set_access")
        self.inner.set_access(address, size)

    def unmap(self, address: int, size: int) -> None:
        self._enter("unmap")
        if self.inner.device != "cpu":
            # Whoever unmaps has drained first; the tests do it here, once for all of them.
            import torch

            torch.cuda.synchronize()
        self.inner.unmap(address, size)

    def pin(self, address: int, size: int) -> None:
        self._enter("pin")
        self.inner.pin(address, size)

    def unpin(self, address: int) -> None:
        self._enter("unpin")
        self.inner.unpin(address)


NewDriver = Callable[[], FlakyDriver]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def new_driver(request: pytest.FixtureRequest) -> Iterator[NewDriver]:
    """Makes drivers of one kind; at the end everything they made has to be gone."""
    if request.param == "cuda":
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")
        torch.cuda.init()
    made: list[FlakyDriver] = []

    def new() -> FlakyDriver:
        driver = FlakyDriver(open_driver(request.param, capacity_bytes=CAPACITY_BYTES))
        made.append(driver)
        return driver

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(crash, "_ranges", ())  # other files' tests leave closed regions that still have tensors
        yield new
        assert not crash.unmapped_ranges(), "a region was not closed"
    for driver in made:
        assert driver.created_bytes == 0, "memory was not given back"
        driver.inner.close()


@pytest.fixture
def driver(new_driver: NewDriver) -> FlakyDriver:
    """One driver."""
    return new_driver()
