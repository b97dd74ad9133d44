"""From what the ranks said about themselves to the one reason a run ended with. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import ClusterError, InterruptedRunError, PeerFailedError, RollplexError, RunFailedError
from rollplex_cli.core.files import read_tail
from rollplex_cli.core.status import ALIVE, RankStatus, error_of, read_status
from rollplex_cli.launch.run_folder import START_MARK
from rollplex_cli.launch.torchrun import port_in_use

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rollplex_cli.core.paths import RunFolder

FIRST_FAILURE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)")
"""How torchrun's log names the worker that ended first."""
PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
SIGNALS = {-6: "aborted", -9: "killed", -11: "crashed"}
TAIL_LINES = 3


def read_statuses(run: RunFolder, num_ranks: int) -> list[RankStatus | None]:
    """Every rank's status by rank; None where a rank wrote none."""
    return [read_status(run.status(rank)) for rank in range(num_ranks)]


def outcome(run: RunFolder, num_ranks: int, *, exit_code: int, signalled: bool, port: int) -> RollplexError | None:
    """Why a run ended; None if every rank is done and well.

    Args:
        run: where statuses and logs are.
        num_ranks: how many ranks there were.
        exit_code: torchrun's.
        signalled: whether the user (or a scheduler) asked the run to stop.
        port: the rendezvous port, for the message if it was taken.
    """
    statuses = read_statuses(run, num_ranks)
    silent = [rank for rank, status in enumerate(statuses) if status is None or status.state in ALIVE]
    culprit, code = _first_failure(run)
    decisive = _decisive([status for status in statuses if status is not None])
    if culprit in silent and not signalled:
        # Its peers may have failed in turn, with reasons that only mirror this one.
        return _died(run, culprit, code)
    if decisive is not None:
        return _located(run, decisive, num_ranks)
    if signalled or any(status is not None and status.state == "interrupted" for status in statuses):
        return interrupted(run, statuses)
    if not any(statuses) and PORT_TAKEN.search("\n".join(read_tail(run.launcher_log, 200))):
        return port_in_use(port)
    if silent:
        return _died(run, silent[0], code) if any(statuses) or exit_code == 0 else _not_started(run, exit_code)
    return None


def interrupted(run: RunFolder, statuses: Sequence[RankStatus | None] = ()) -> InterruptedRunError:
    """The error for a run that was asked to stop, with how to go on."""
    said = next((s.message for s in statuses if s is not None and s.state == "interrupted" and s.message), "")
    resumable = run.checkpoints_dir.is_dir() and any(run.checkpoints_dir.iterdir())
    hint = f"continue with `rollplex train --resume --run-dir {run.root}`"
    return InterruptedRunError(
        said or ("interrupted" if resumable else "interrupted before the first checkpoint"), hint=hint
    )


def _decisive(statuses: Sequence[RankStatus]) -> RankStatus | None:
    """The failure that came first, those that only follow another rank's last."""
    bad = [s for s in statuses if s.state == "failed" or (s.state == "done" and s.exit_code)]
    follows = PeerFailedError.__name__
    return min(bad, key=lambda s: (s.error == follows, s.time, s.rank), default=None)


def _located(run: RunFolder, status: RankStatus, num_ranks: int) -> RollplexError:
    error = error_of(status)
    if error.exit_code != 1:
        return error
    where = f"rank {status.rank}: " if num_ranks > 1 else ""
    waiting = f" (waiting for {', '.join(status.waiting)})" if status.waiting else ""
    hint = f"{error.hint}; " if error.hint else ""
    located = type(error)(f"{where}{error.message}{waiting}", hint=f"{hint}the log is `{run.rank_log(status.rank)}`")
    located.exit_code = error.exit_code
    return located


def _first_failure(run: RunFolder) -> tuple[int, int]:
    """Rank and exit code of the worker that torchrun saw end first; (-1, 0) if it saw none."""
    for line in read_tail(run.launcher_log, 400):
        found = FIRST_FAILURE.search(line)
        if found:
            return int(found.group(2)), int(found.group(1))
    return -1, 0


def _died(run: RunFolder, rank: int, code: int) -> RunFailedError:
    log = run.rank_log(rank) if _tail_lines(run.rank_log(rank)) else run.launcher_log
    how = f"ended with exit code {code}" if code > 0 else "ended"
    if code < 0:
        how = f"was {SIGNALS.get(code, 'ended')} by signal {-code}"
    hint = f"the log is `{log}`"
    if code == -9:
        hint = f"signal 9 often comes from the kernel when memory runs out; {hint}"
    return RunFailedError(f"rank {rank} {how} and left no reason{log_tail(log)}", hint=hint)


def _not_started(run: RunFolder, exit_code: int) -> ClusterError:
    log = run.launcher_log
    return ClusterError(f"no rank started, torchrun exited {exit_code}{log_tail(log)}", hint=f"the log is `{log}`")


def log_tail(log: Path) -> str:
    """The last lines of a log as the end of a message; nothing for an empty log."""
    lines = _tail_lines(log)
    return "; its log ends with:" + "".join(f"\n  {line}" for line in lines) if lines else ""


def _tail_lines(log: Path) -> list[str]:
    lines = read_tail(log, TAIL_LINES)
    marks = [index for index, line in enumerate(lines) if line.startswith(START_MARK)]
    return lines[marks[-1] + 1 :] if marks else lines
