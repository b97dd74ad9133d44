"""The control thread's duties while other threads work: signals, peers, status file, stall watchdog."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any, TypeVar

from rollplex_cli.core.errors import StallError
from rollplex_cli.core.names import Phase, TaskKind
from rollplex_cli.core.status import RankStatus, failed_rank, write_status

if TYPE_CHECKING:
    from pathlib import Path

    from rollplex_cli.runtime.control.peers import Peers
    from rollplex_cli.runtime.executor.executor import Executor
    from rollplex_cli.runtime.executor.phases import PhaseMachine
    from rollplex_cli.runtime.launches.watch import CollectiveWatch

T = TypeVar("T")

STATUS_EVERY_S = 0.5


class Control:
    """Looks after a rank while its lanes work. `tick` is called from every wait of the control thread.

    Args:
        stall_timeout_s: longest time without a completed task.
        start_timeout_s: the same before the first step, where one task is a whole engine; at least the other.
        status_path: where this rank's status goes.
    """

    def __init__(
        self,
        peers: Peers,
        machine: PhaseMachine,
        status_path: Path,
        stall_timeout_s: float,
        start_timeout_s: float = 0.0,
    ) -> None:
        self.peers = peers
        self._machine = machine
        self._status_path = status_path
        self._stall_timeout_s = stall_timeout_s
        self._start_timeout_s = max(start_timeout_s, stall_timeout_s)
        self._executor: Executor | None = None
        self._started = False
        self._doing = "starting"
        self._doing_since = time.monotonic()
        self._num_doings = 0
        self._last_status = 0.0
        self._last_peer_check = 0.0
        self._host = socket.gethostname()
        self.step = 0
        self._collectives: CollectiveWatch | None = None
        self._stop_requested = threading.Event()

    @property
    def stop_requested(self) -> bool:
        """Whether a signal asked for a stop at the next step boundary."""
        return self._stop_requested.is_set()

    @property
    def phase(self) -> str:
        """Phase of this rank."""
        return str(self._machine.state)

    def install_signals(self) -> None:
        """SIGTERM, SIGINT and SIGUSR2 ask for a stop with a checkpoint. Main thread only."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, lambda _number, _frame: self._stop_requested.set())

    def watch(self, executor: Executor | None) -> None:
        """Take the waits of this executor into status and stall messages (None: of no step)."""
        self._executor = executor
        self._started |= executor is not None

    def watch_collectives(self, watch: CollectiveWatch) -> None:
        """Take the collectives that this rank is in into status and stall messages. Any thread."""
        self._collectives = watch

    def doing(self, what: str) -> None:
        """Name what the control thread waits for outside a step; restarts the stall clock."""
        self._doing = what
        self._doing_since = time.monotonic()
        self._num_doings += 1

    def touch(self) -> None:
        """A job outside a step got on: restarts the stall clock. Any thread."""
        self._doing_since = time.monotonic()
        self._num_doings += 1

    def tick(self) -> None:
        """Check peers and the stall clock, refresh the status file.

        Raises:
            PeerFailedError: another rank failed.
            StallError: nothing was completed for too long.
        """
        now = time.monotonic()
        if now - self._last_peer_check > 0.2:
            self._last_peer_check = now
            self.peers.check_failure()
            tasks = self._executor.num_progress if self._executor is not None else 0
            self.peers.report_progress(f"{self.step}/{self._num_doings}/{tasks}")
            if self._collectives is not None:
                self._collectives.tell()
        if now - self._last_status > STATUS_EVERY_S:
            self._last_status = now
            self.write("running" if self.step or self._executor else "starting")
        # A rank that waits for a slow peer is not stalled; the peer watches over itself.
        idle_s = now - max(self._doing_since, self.peers.peer_progress_at)
        if self._executor is not None:
            idle_s = min(idle_s, self._executor.seconds_since_progress)
        if idle_s > (self._stall_timeout_s if self._started else self._start_timeout_s):
            error = self._stall(idle_s)
            # At once: the lanes may sit in calls that nothing interrupts, and closing them takes its time.
            status = failed_rank(
                self.peers.rank, error, step=self.step, phase=str(self._machine.state), waiting=self.waiting()
            )
            write_status(self._status_path, status)
            self.peers.announce_failure(error.message)
            raise error

    def _stall(self, idle_s: float) -> StallError:
        waits = "; ".join(self.waiting())
        rewards = self._executor.running(TaskKind.REWARD) if self._executor is not None else []
        limit = "stall_timeout_s" if self._started else "start_timeout_s"
        hint = f"`runtime.{limit}` sets the limit"
        if rewards:
            key, seconds = rewards[0]
            return StallError(
                f"rank {self.peers.rank}: the reward function has not returned for {seconds:.0f} s: `{key}` of step "
                f"{self.step}, phase {self._machine.state}",
                hint=f"give what it waits for a time limit of its own; {hint}",
            )
        return StallError(
            f"rank {self.peers.rank} completed nothing for {idle_s:.0f} s in phase {self._machine.state}: {waits}",
            hint=f"{hint}; the status files name what every rank waits for",
        )

    def waiting(self) -> list[str]:
        """What this rank waits for, one line each."""
        here = [f"control: {self._doing}"] if self._doing else []
        if self.peers.waiting_for is not None:
            here.append(f"control: rank {self.peers.waiting_for} to arrive there too")
        if self._collectives is not None:
            here += self._collectives.lines()
        return here + (self._executor.waiting_for() if self._executor is not None else [])

    def write(self, state: str, **fields: Any) -> None:
        """Write this rank's status file."""
        values = {
            "step": self.step,
            "phase": str(self._machine.state),
            "waiting": self.waiting(),
            "pid": os.getpid(),
            "host": self._host,
            **fields,
        }
        write_status(self._status_path, RankStatus(rank=self.peers.rank, state=state, **values))  # type: ignore[arg-type]

    def await_future(self, future: Future[T], what: str) -> T:
        """Wait for a lane's job, looking after the rank meanwhile."""
        self.doing(what)
        while not wait({future}, timeout=0.05).done:
            self.tick()
        self.doing("")
        return future.result()

    def go(self, machine: PhaseMachine, wanted: Phase) -> None:
        """Agree with every rank on a transition and make it (invariant 8)."""
        self.doing(f"phase {wanted}")
        self.peers.meet(f"step {self.step}: {machine.state} -> {wanted}", {}, self.tick)
        self.doing("")
        machine.to(wanted)
