"""Running a job's processes from start to end: preparation, workers, signals, and the reason it ended."""

from __future__ import annotations

import os
import signal
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import RollplexError, RunFailedError
from rollplex_cli.core.status import error_of, read_prepare_status
from rollplex_cli.launch import torchrun
from rollplex_cli.launch.outcome import interrupted, log_tail, outcome, read_statuses
from rollplex_cli.launch.run_folder import begin_start, lock_run
from rollplex_cli.launch.subprocess import Child, children, find_processes, send_signal
from rollplex_cli.launch.torchrun import Rendezvous, choose_port, prepare_argv, worker_argv, worker_env

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path
    from types import FrameType

    from rollplex_cli.core.paths import RunFolder
    from rollplex_cli.plan.build import Plan
    from rollplex_cli.profile.schema import Profile

TICK_S = 0.25
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


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
    lock = lock_run(run)
    try:
        with stop_requests() as requests:
            port = choose_port(profile.runtime.master_port)
            env = worker_env(profile, os.environ)
            begin_start(run)
            _prepare(run, env, requests, on_tick)
            # The port was free before the preparation, which may take minutes: look again.
            port = choose_port(profile.runtime.master_port or port)
            argv = worker_argv(plan, run, Rendezvous(port=port))
            _run_workers(argv, env, plan.topology.num_ranks, port, run, requests, on_tick)
    finally:
        lock.release()


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
        code = _watch(Child(argv, log=log, env=env), requests, lambda: None, workers=False)
        if requests.stop:
            raise interrupted(run)
    if code:
        raise _child_error(said, log, f"{what} ended", code)


def _prepare(run: RunFolder, env: dict[str, str], requests: StopRequests, on_tick: Callable[[], None]) -> None:
    status = read_prepare_status(run.prepare_status)
    if status is not None and status.stage == "done" and run.base_dir.is_dir():
        return
    run.prepare_status.unlink(missing_ok=True)
    code = _watch(Child(prepare_argv(run), log=run.prepare_log, env=env), requests, on_tick, workers=False)
    if requests.stop:
        raise interrupted(run)
    if code:
        raise _child_error(run.prepare_status, run.prepare_log, "the preparation ended", code)


def _child_error(said: Path, log: Path, what: str, code: int) -> RollplexError:
    status = read_prepare_status(said)
    if status is None or status.stage != "failed":
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return RunFailedError(f"{what} {how}{log_tail(log)}", hint=f"the log is `{log}`")
    error = error_of(status)
    if error.exit_code == 1:
        error.hint = f"{error.hint}; the log is `{log}`" if error.hint else f"the log is `{log}`"
    return error


def _run_workers(
    argv: Sequence[str],
    env: dict[str, str],
    num_ranks: int,
    port: int,
    run: RunFolder,
    requests: StopRequests,
    on_tick: Callable[[], None],
) -> None:
    # The launcher's log says which worker ended first: an earlier start's lines must not answer for this one.
    run.launcher_log.unlink(missing_ok=True)
    try:
        code = _watch(Child(argv, log=run.launcher_log, env=env), requests, on_tick, workers=True)
    finally:
        # Workers live in sessions of their own and survive a launcher that was killed.
        send_signal(find_processes(torchrun.WORKER, str(run.root.resolve())), signal.SIGKILL)
    if requests.kill:
        raise interrupted(run, read_statuses(run, num_ranks))
    error = outcome(run, num_ranks, exit_code=code, signalled=requests.stop, port=port)
    if error is not None:
        raise error


def _watch(child: Child, requests: StopRequests, on_tick: Callable[[], None], *, workers: bool) -> int:
    """Wait for a child, pass stop requests on, and never leave a process behind. Returns its exit code."""
    told = False
    try:
        while (code := child.poll()) is None:
            on_tick()
            if requests.kill:
                child.kill_tree()
            elif requests.stop and not told:
                told = True
                _tell(child, workers=workers)
            time.sleep(TICK_S)
        on_tick()
        return code
    finally:
        child.kill_tree()


def _tell(child: Child, *, workers: bool) -> None:
    """Ask to stop: the workers themselves, since torchrun would give them 30 seconds and then kill them."""
    targets = children(child.pid) if workers else []
    send_signal(targets or [child.pid], signal.SIGTERM)
