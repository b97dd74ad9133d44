"""A rank's process: `python -m rollplex_cli.runtime.worker RUN_DIR`, started by torchrun.

A run folder with a checkpoint is continued from it; whether that is wanted was decided before the launch.

Whatever ends it, the rank's status file says why before the process ends; exit codes of processes are not relied on.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import InterruptedRunError, PeerFailedError, RollplexError, TargetNotReachedError
from rollplex_cli.core.imports import without_collector
from rollplex_cli.core.log import redirect_output, setup_logging
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.status import failed_rank, write_status

if TYPE_CHECKING:
    from rollplex_cli.runtime.control.control import Control

log = logging.getLogger("rollplex.worker")


def main(argv: list[str] | None = None) -> int:
    """Run the rank; returns the process's exit code. What the run ends with is in the status file."""
    parser = argparse.ArgumentParser(prog="rollplex_cli.runtime.worker")
    parser.add_argument("run_dir", type=Path)
    arguments = parser.parse_args(argv)
    run, rank = RunFolder(arguments.run_dir), int(os.environ.get("RANK", "0"))
    redirect_output(run.rank_log(rank))
    setup_logging()
    log.info(
        "rank %d of %s on %s, process %d", rank, os.environ.get("WORLD_SIZE", "1"), socket.gethostname(), os.getpid()
    )
    session = _Session(run, rank)
    try:
        session.run()
    except BaseException as error:
        code = session.report(error)
        session.close(error)
        return code
    session.close()
    session.done()
    return 0


class _Session:
    """Engines and process group from start to end, whatever happens between."""

    def __init__(self, run: RunFolder, rank: int) -> None:
        self._run, self._rank = run, rank
        self._stack = contextlib.ExitStack()
        self._control: Control | None = None

    def run(self) -> None:
        """Build the rank and do its work: a training run, or the benchmark or measurement that the run folder asks
        for."""
        # Heavy imports come after the log is redirected: what they print belongs there.
        with without_collector():
            from rollplex_cli.runtime.assembly.build import open_control, open_rank
            from rollplex_cli.runtime.bench.measure import run_measure
            from rollplex_cli.runtime.bench.run import run_bench
            from rollplex_cli.runtime.loop import Run

        control, machine = self._stack.enter_context(open_control(self._run, self._rank))
        self._control = control
        rank = self._stack.enter_context(open_rank(self._run, control, machine))
        if self._run.bench.exists():
            run_bench(rank)
        elif self._run.measure.exists():
            run_measure(rank)
        else:
            work = Run(rank)
            work.resume()
            work.run()
        # Nobody takes down what a slower peer still needs.
        rank.peers.meet("end", {}, control.tick)

    def done(self) -> None:
        """The rank did all its work. Written last: waits write the status too."""
        if self._control is not None:
            self._control.write("done", exit_code=0, waiting=[])

    def report(self, error: BaseException) -> int:
        """Tell the peers and the status file why this rank ends; returns the process's exit code."""
        if self._control is not None:
            error = self._control.peers.first_cause(error)
        expected = _expected(error)
        log.log(logging.INFO if expected else logging.ERROR, "%s", error, exc_info=None if expected else error)
        control = self._control
        waiting = control.waiting() if control is not None else []
        step, phase = (control.step, control.phase) if control is not None else (0, "")
        status = failed_rank(self._rank, error, step=step, phase=phase, waiting=waiting)
        try:
            write_status(self._run.status(self._rank), status)
        except OSError:  # a full disk is a reason to end; peers and the log still learn it
            log.exception("cannot write the status")
        if control is not None and not expected and not isinstance(error, PeerFailedError):
            with contextlib.suppress(Exception):  # the store may be what failed
                control.peers.announce_failure(getattr(error, "message", f"{type(error).__name__}: {error}"))
        # Of an end that all ranks agreed on torchrun must not make a failure: it would take down the store, which a
        # slower rank of another node may still read.
        if expected:
            return 0
        return error.exit_code if isinstance(error, RollplexError) else int(status.exit_code or 1)

    def close(self, error: BaseException | None = None) -> None:
        """Close lanes, engines and the process group. A second fault on the way out must not hide the first.

        After a failure the contexts must see it: what they do at an orderly end waits for lanes and peers that may
        never answer.
        """
        failure = error if error is not None and not _expected(error) else None
        try:
            if failure is None:
                self._stack.close()
            else:
                self._stack.__exit__(type(failure), failure, failure.__traceback__)
        except BaseException:
            log.exception("while closing")


def _expected(error: BaseException) -> bool:
    """An end that every rank comes to together."""
    return isinstance(error, InterruptedRunError | TargetNotReachedError)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A lane that sits in a collective whose peer is gone would keep the interpreter from ending.
    os._exit(code)
