"""What ranks learn of each other's failures."""

from __future__ import annotations

import pytest

from rollplex_cli.core.errors import NonFiniteError, PeerFailedError
from rollplex_cli.runtime.control.peers import Peers


class Memory:
    """A store in one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


def test_a_connection_that_a_failed_peer_closed_is_reported_as_its_failure() -> None:
    store = Memory()
    broken = RuntimeError("Connection closed by peer")
    first, second = Peers(store, 0, 2), Peers(store, 1, 2)
    assert first.first_cause(broken, patience_s=0.1) is broken
    second.announce_failure("out of memory")
    cause = first.first_cause(broken)
    assert isinstance(cause, PeerFailedError)
    assert cause.message == "rank 1 failed: out of memory"
    assert second.first_cause(broken, patience_s=0.1) is broken
    own = NonFiniteError("a loss")
    assert first.first_cause(own) is own


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_a_store_that_answers_the_error_stands(world_size: int) -> None:
    class Gone(Memory):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("store is gone")

    error = RuntimeError("Connection closed by peer")
    assert Peers(Gone() if world_size > 1 else None, 0, world_size).first_cause(error) is error
