"""What ranks tell each other outside of the trainer's collectives: agreements and failures.

Both go through the rendezvous store, polled by the control thread. A gloo barrier would be shorter to write and
could not be interrupted: a rank whose peer died inside it would report a collective time-out, not the reason.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, Protocol

from rollplex_cli.core.errors import PeerFailedError, PhaseError

if TYPE_CHECKING:
    from collections.abc import Callable


_TRANSPORTS = ("gloo", "NCCL", "c10d", "Connection closed by peer")
"""Words by which an error of a collective is known; it has no class of its own."""


class Store(Protocol):
    """The part of torch.distributed's store that is used."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Read a key, waiting for it."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""

    def delete_key(self, key: str) -> bool:
        """Remove a key."""

    def clone(self) -> Store:
        """Another connection to the same store."""


class Peers:
    """Agreement among the ranks of a run. All calls come from the control thread.

    Invariant 8 of the design: every rank makes the same agreements in the same order, with the same name; a
    mismatch raises on every rank that sees it. A rank that fails says so first, and every other rank stops with
    its reason within one poll.

    Args:
        store: the rendezvous store; None for a run of one rank.
        namespace: keeps keys of two runs over one store apart (a restarted worker group reuses its store).
    """

    def __init__(self, store: Store | None, rank: int, world_size: int, namespace: str = "0") -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self.namespace = f"rollplex/{namespace}"
        """Prefix of every key of this run."""
        self._meetings = 0
        self.waiting_for: int | None = None
        """Rank that an agreement waits for now."""
        self.peer_progress_at = 0.0
        """When (monotonic seconds) a rank that was waited for last showed progress."""

    def another_connection(self) -> Store | None:
        """A connection to the store for another thread; None where there is no store."""
        return None if self._store is None else self._store.clone()

    def report_progress(self, mark: str) -> None:
        """Publish a mark that changes whenever this rank gets on."""
        if self._store is not None and self.world_size > 1:
            self._store.set(f"{self.namespace}/progress/{self.rank}", mark)

    def say(self, topic: str, text: str) -> None:
        """Let every rank read `text` of this one, in place of what it said before."""
        if self._store is not None and self.world_size > 1:
            self._store.set(f"{self.namespace}/{topic}/{self.rank}", text)

    def heard(self, topic: str, rank: int) -> str | None:
        """What a rank said last; None where it said nothing, or the store is gone."""
        key = f"{self.namespace}/{topic}/{rank}"
        try:
            return self._store.get(key).decode() if self._store is not None and self._store.check([key]) else None
        except RuntimeError:  # with the rank that held it
            return None

    def meet(self, name: str, value: dict[str, Any], on_wait: Callable[[], None]) -> list[dict[str, Any]]:
        """Exchange a small JSON object with every rank; returns all of them in rank order.

        Floats survive exactly (JSON keeps their shortest exact form).

        Args:
            name: what is agreed; the same on every rank.
            on_wait: called while waiting; may raise.

        Raises:
            PeerFailedError: a peer failed meanwhile.
            PhaseError: another rank is at a different agreement.
        """
        if self._store is None or self.world_size == 1:
            return [value]
        number = self._meetings
        self._meetings += 1
        self._store.set(self._key(number, self.rank), json.dumps({"name": name, "value": value}))
        values = []
        for rank in range(self.world_size):
            self._await(rank, self._key(number, rank), on_wait)
            theirs = json.loads(self._store.get(self._key(number, rank)))
            if theirs["name"] != name:
                raise PhaseError(f"rank {self.rank} is at `{name}` while rank {rank} is at `{theirs['name']}`")
            values.append(theirs["value"])
        if number >= 2:  # everybody has left the meeting before the last one
            self._store.delete_key(self._key(number - 2, self.rank))
        return values

    def announce_failure(self, message: str) -> None:
        """Tell every rank that this one cannot go on."""
        if self._store is not None:
            key = f"{self.namespace}/failure"
            if not self._store.check([key]):
                self._store.set(key, json.dumps({"rank": self.rank, "message": message}))

    def check_failure(self) -> None:
        """Raise PeerFailedError if another rank announced that it failed."""
        if self._store is None or not self._store.check([f"{self.namespace}/failure"]):
            return
        failure = json.loads(self._store.get(f"{self.namespace}/failure"))
        if failure["rank"] != self.rank:
            raise PeerFailedError(f"rank {failure['rank']} failed: {failure['message']}")

    def first_cause(self, error: BaseException, patience_s: float = 3.0) -> BaseException:
        """The failure that a peer announced, where `error` may be its consequence: a collective whose peer is gone
        raises before the peer's reason was read. Any other error stands for itself."""
        deadline = time.monotonic() + patience_s
        transport = isinstance(error, RuntimeError) and any(word in str(error) for word in _TRANSPORTS)
        while self.world_size > 1 and transport:
            try:
                self.check_failure()
            except PeerFailedError as first:
                return first
            except RuntimeError:  # the store is gone with its rank
                return error
            if time.monotonic() > deadline:
                return error
            time.sleep(0.05)
        return error

    def _await(self, rank: int, key: str, on_wait: Callable[[], None]) -> None:
        assert self._store is not None
        pause_s, next_look, mark = 0.0002, 0.0, b""
        progress = f"{self.namespace}/progress/{rank}"
        self.waiting_for = rank
        while not self._store.check([key]):
            self.check_failure()
            if time.monotonic() > next_look and self._store.check([progress]):
                next_look = time.monotonic() + 0.5
                latest = self._store.get(progress)
                if latest != mark:
                    mark, self.peer_progress_at = latest, time.monotonic()
            on_wait()
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.02)
        self.waiting_for = None

    def _key(self, number: int, rank: int) -> str:
        return f"{self.namespace}/meet/{number}/{rank}"
