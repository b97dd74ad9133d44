"""Running a job's processes from start to end: preparation, workers, signals, and the reason it ended."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import RollplexError, RunFailedError, StallError
from rollplex_cli.core.files import read_tail
from rollplex_cli.core.status import ALIVE, error_of, read_prepare_status, read_status
from rollplex_cli.launch import torchrun
from rollplex_cli.launch.outcome import FIRST_FAILURE, interrupted, log_tail, outcome, read_statuses
from rollplex_cli.launch.record import LaunchRecord, ended_record, new_record, read_record, write_record
from rollplex_cli.launch.registry import remember
from rollplex_cli.launch.run_folder import begin_start, lock_run
from rollplex_cli.launch.subprocess import (
    Child,
    children,
    find_processes,
    kill_processes,
    living,
    send_signal,
)
from rollplex_cli.launch.torchrun import Rendezvous, choose_port, prepare_argv, worker_argv, worker_env

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import FrameType

    from rollplex_cli.core.paths import RunFolder
    from rollplex_cli.plan.build import Plan
    from rollplex_cli.profile.schema import Profile

TICK_S = 0.25
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
LOOK_EVERY_S = 2.0
LAST_WORDS_S = 10.0
"""How long the ranks of a node may go on once one of them has ended: the time to say what they waited for."""


class StopRequests:
    """What the user or a scheduler asked for since the run began."""

    def __init__(self) -> None:
        self.stop = False
        self.kill = False

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Signal handler: the first signal asks to stop, a second Ctrl-C to stop at once."""
        if number == signal.SIGINT and self.stop:
            self.kill = True
        self.stop = True


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Collect stop signals inside the block; outside it they act as before."""
    requests = StopRequests()
    before = {number: signal.signal(number, requests.handle) for number in FORWARDED}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def supervise(profile: Profile, plan: Plan, run: RunFolder, *, on_tick: Callable[[], None] = lambda: None) -> None:
    """Prepare and run a job on this node; returns when every rank is done.

    Args:
        profile: the resolved profile, as in the run folder.
        plan: its plan.
        run: the run folder; no other process may run in it.
        on_tick: called about four times a second for a live view.

    Raises:
        RollplexError: the reason the run ended with, with the exit code of the program.
    """
    num_ranks = plan.topology.num_ranks
    on_tick = _until_it_is_gone(on_tick)
    with supervised(run, new_record(run)) as (record, requests):
        choose_port(profile.runtime.master_port)  # a port in use is said before the preparation, which may take minutes
        env = worker_env(profile, os.environ)
        prepare_run(run, env, requests, on_tick)
        port = choose_port(profile.runtime.master_port)
        write_record(run, dataclasses.replace(record, stage="workers"))
        argv = worker_argv(plan, run, Rendezvous(port=port))
        code = run_workers(argv, env, run.launcher_log, run, requests, on_tick)
        if requests.kill:
            raise interrupted(run, read_statuses(run, num_ranks))
        error = outcome(run, num_ranks, exit_code=code, signalled=requests.stop, port=port)
        if error is not None:
            raise error


@contextmanager
def supervised(run: RunFolder, record: LaunchRecord) -> Iterator[tuple[LaunchRecord, StopRequests]]:
    """Hold the run folder and collect signals; the run's record says how the block ended."""
    lock = lock_run(run)
    try:
        with stop_requests() as requests:
            if record.job_id is None:
                # An earlier supervisor may have been killed: what it started must not write beside this start. A
                # scheduler ends what it started itself, and other nodes of this start may share the machine.
                send_signal(_own_processes(run), signal.SIGKILL)
            begin_start(run)
            if record.job_id is None:
                # A scheduler's job may have been cancelled before it came to start.
                run.cancelled.unlink(missing_ok=True)
            write_record(run, record)
            remember(run, record.job_id)
            try:
                yield record, requests
            except BaseException as error:
                write_record(run, ended_record(read_record(run) or record, error))
                raise
            write_record(run, ended_record(read_record(run) or record, None))
    finally:
        lock.release()


def _own_processes(run: RunFolder) -> list[int]:
    root = str(run.root.resolve())
    return [*find_processes(torchrun.WORKER, root), *find_processes(torchrun.PREPARE, root)]


def _until_it_is_gone(on_tick: Callable[[], None]) -> Callable[[], None]:
    """A view that lost its terminal (a closed window, a dropped connection) must not take the run along: the workers
    are to end with a checkpoint, as the SIGHUP that comes with it asks."""
    gone = False

    def tick() -> None:
        nonlocal gone
        if not gone:
            try:
                on_tick()
            except OSError:
                gone = True

    return tick


def run_child(argv: Sequence[str], run: RunFolder, env: dict[str, str], *, what: str) -> None:
    """Run one helper process of a run folder to its end, its output in `logs/<what>.log`.

    Raises:
        InterruptedRunError: a signal asked it to stop.
        RollplexError: the reason in `status/<what>.json` where it left one, else a RunFailedError whose message
            ends with its last lines.
    """
    log, said = run.logs_dir / f"{what}.log", run.status_dir / f"{what}.json"
    said.unlink(missing_ok=True)
    with stop_requests() as requests:
        code = _watch(Child(argv, log=log, env=env), requests, lambda: None, launcher_log=None)
        if requests.stop:
            raise interrupted(run)
    if code:
        raise _child_error(said, log, f"{what} ended", code)


def prepare_run(run: RunFolder, env: dict[str, str], requests: StopRequests, on_tick: Callable[[], None]) -> None:
    """Bring a run's data and base checkpoint about, unless an earlier start did. Raises as `run_child`."""
    status = read_prepare_status(run.prepare_status)
    if status is not None and status.stage == "done" and run.base_dir.is_dir():
        return
    run.prepare_status.unlink(missing_ok=True)
    code = _watch(Child(prepare_argv(run), log=run.prepare_log, env=env), requests, on_tick, launcher_log=None)
    if requests.stop:
        raise interrupted(run)
    if code:
        raise _child_error(run.prepare_status, run.prepare_log, "the preparation ended", code)


def run_workers(
    argv: Sequence[str],
    env: dict[str, str],
    log: Path,
    run: RunFolder,
    requests: StopRequests,
    on_tick: Callable[[], None],
    peers_failed: Callable[[], bool] = lambda: False,
) -> int:
    """Run this node's torchrun and its workers to their end; returns torchrun's exit code.

    Args:
        peers_failed: whether another node has lost a rank, so that those here wait in vain.
    """
    look = _NowAndThen(lambda: peers_failed() or _in_vain(run))
    # The launcher's log says which worker ended first: an earlier start's lines must not answer for this one.
    log.unlink(missing_ok=True)
    child = Child(argv, log=log, env=env)
    try:
        return _watch(child, requests, on_tick, launcher_log=log, peers_failed=look)
    finally:
        # Workers live in sessions of their own and survive a launcher that was killed. Nodes may share a machine.
        own = f"{torchrun.NODE}={env[torchrun.NODE]}"
        kill_processes(find_processes(torchrun.WORKER, str(run.root.resolve()), variable=own))


class _NowAndThen:
    """A question that reads files, asked every two seconds however often it is called."""

    def __init__(self, question: Callable[[], bool]) -> None:
        self._question, self._next, self._answer = question, 0.0, False

    def __call__(self) -> bool:
        if time.monotonic() > self._next:
            self._next = time.monotonic() + LOOK_EVERY_S
            self._answer = self._question()
        return self._answer


def _in_vain(run: RunFolder) -> bool:
    """Whether the ranks wait for something that never comes: one died without a word, or says itself that it waits.

    torchrun notices a death only where the others end when they are told to, and else gives them half a minute.
    """
    said = [status for path in run.status_dir.glob("rank*.json") if (status := read_status(path)) is not None]
    here = [s.pid for s in said if s.state in ALIVE and s.pid is not None and s.host in ("", socket.gethostname())]
    return any(s.error == StallError.__name__ for s in said) or (bool(here) and not set(here) <= living())


def _child_error(said: Path, log: Path, what: str, code: int) -> RollplexError:
    status = read_prepare_status(said)
    if status is None or status.stage != "failed":
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return RunFailedError(f"{what} {how}{log_tail(log)}", hint=f"the log is `{log}`")
    error = error_of(status)
    if error.exit_code == 1:
        error.hint = f"{error.hint}; the log is `{log}`" if error.hint else f"the log is `{log}`"
    return error


def _watch(
    child: Child,
    requests: StopRequests,
    on_tick: Callable[[], None],
    *,
    launcher_log: Path | None,
    peers_failed: Callable[[], bool] = lambda: False,
) -> int:
    """Wait for a child, pass stop requests on, and never leave a process behind. Returns its exit code."""
    told, failed_at = False, None
    try:
        while (code := child.poll()) is None:
            on_tick()
            if requests.kill:
                child.kill_tree()
            elif requests.stop and not told:
                told = True
                _tell(child, workers=launcher_log is not None)
            if launcher_log is not None and failed_at is None and (_lost_a_rank(launcher_log) or peers_failed()):
                failed_at = time.monotonic()
            waited_s = time.monotonic() - failed_at if failed_at is not None else 0.0
            if waited_s > 2 * LAST_WORDS_S:
                child.kill_tree()
            elif waited_s > LAST_WORDS_S:
                # The others may sit in a collective that never ends. torchrun has yet to say which one ended first.
                send_signal(children(child.pid), signal.SIGKILL)
            time.sleep(TICK_S)
        on_tick()
        return code
    finally:
        child.kill_tree()


def _lost_a_rank(launcher_log: Path) -> bool:
    return any(FIRST_FAILURE.search(line) for line in read_tail(launcher_log, 100))


def _tell(child: Child, *, workers: bool) -> None:
    """Ask to stop: the workers themselves, since torchrun would give them 30 seconds and then kill them."""
    if not workers:
        send_signal([child.pid], signal.SIGTERM)
    elif ranks := children(child.pid):
        send_signal(ranks, signal.SIGTERM)
    else:
        # Nothing has begun that could be lost.
        child.kill_tree()
