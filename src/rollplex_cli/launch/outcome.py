"""From what the ranks said about themselves to the one reason a run ended with. Pure."""

from __future__ import annotations

import math
import re
import signal
import time
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import (
    ClusterError,
    InterruptedRunError,
    PeerFailedError,
    RankLostError,
    RollplexError,
    RunFailedError,
    StallError,
)
from rollplex_cli.core.files import read_tail
from rollplex_cli.core.status import ALIVE, RankStatus, error_of, read_status
from rollplex_cli.launch.run_folder import START_MARK
from rollplex_cli.launch.torchrun import port_in_use

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rollplex_cli.core.paths import RunFolder

FIRST_FAILURE = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)(?: \(pid: (\d+)\))?")
"""How torchrun's log names the worker that ended first."""
PORT_TAKEN = re.compile(r"EADDRINUSE|address already in use", re.IGNORECASE)
SIGNALS = {-6: "aborted", -9: "killed", -11: "crashed"}
TAIL_LINES = 3
AWAITED = re.compile(r"control: rank (\d+) to arrive there too")
"""How a rank says that it waits for another one and for nothing of its own."""
STOPPED = (-signal.SIGTERM, -signal.SIGUSR2, -signal.SIGINT)
"""Exit codes of a rank that was asked to stop while it was still being loaded."""
MAX_RANKS_SHOWN = 8
BETWEEN_WAITS = "waiting for nothing"
"""Of a rank that last spoke between two waits."""


def read_statuses(run: RunFolder, num_ranks: int) -> list[RankStatus | None]:
    """Every rank's status by rank; None where a rank wrote none."""
    return [read_status(run.status(rank)) for rank in range(num_ranks)]


def outcome(
    run: RunFolder, num_ranks: int, *, exit_code: int, signalled: bool, port: int, num_nodes: int = 1
) -> RollplexError | None:
    """Why a run ended; None if every rank is done and well.

    Args:
        run: where statuses and logs are.
        num_ranks: how many ranks there were.
        exit_code: torchrun's.
        signalled: whether the user (or a scheduler) asked the run to stop.
        port: the rendezvous port, for the message if it was taken.
        num_nodes: how many nodes left a launcher's log.
    """
    statuses = read_statuses(run, num_ranks)
    silent = [rank for rank, status in enumerate(statuses) if status is None or status.state in ALIVE]
    failures = _first_failures(run, num_nodes)
    if signalled and not any(statuses):
        return interrupted(run, statuses)
    if signalled and any(code in STOPPED for code, _, _ in failures):
        # It came before a rank could listen. What the others then complain of only follows.
        return interrupted(run, statuses)
    culprit, code = _culprit(failures, statuses, silent, num_nodes)
    decisive = _decisive([status for status in statuses if status is not None])
    # Where a rank ended without a word, its peers may have failed in turn, with reasons that only mirror this one.
    if culprit in silent and not signalled:
        return _died(run, culprit, code, statuses)
    if culprit in silent and code == -signal.SIGTERM:
        return interrupted(run, statuses)  # the signal came before the rank could listen to it
    if decisive is not None:
        if decisive.error == StallError.__name__:
            rank = _hung(decisive, statuses)
            status = statuses[rank] if rank < len(statuses) else None
            if status is None or status.state in ALIVE:
                return _silent_stall(run, rank, statuses)
            decisive = status if status.error == StallError.__name__ else decisive
        return _located(run, decisive, num_ranks, statuses)
    if all(status is not None and status.state == "done" for status in statuses):
        return None  # a signal that came when the last step was done stopped nothing
    if signalled or any(status is not None and status.state == "interrupted" for status in statuses):
        return interrupted(run, statuses)
    if not any(statuses) and PORT_TAKEN.search("\n".join(read_tail(run.launcher_log, 200))):
        return port_in_use(port)
    if silent:
        return (
            _died(run, silent[0], code, statuses) if any(statuses) or exit_code == 0 else _not_started(run, exit_code)
        )
    return None


def interrupted(run: RunFolder, statuses: Sequence[RankStatus | None] = ()) -> InterruptedRunError:
    """The error for a run that was asked to stop, with how to go on."""
    said = next((s.message for s in statuses if s is not None and s.state == "interrupted" and s.message), "")
    resumable = run.checkpoints_dir.is_dir() and any(run.checkpoints_dir.iterdir())
    hint = f"continue with `rollplex train --resume --run-dir {run.root}`"
    if run.bench.exists() or run.measure.exists():
        hint = "a benchmark or measurement is not continued: start it again with another `--run-dir`"
    return InterruptedRunError(
        said or ("interrupted" if resumable else "interrupted before the first checkpoint"), hint=hint
    )


def _decisive(statuses: Sequence[RankStatus]) -> RankStatus | None:
    """The failure that came first, those that only follow another rank's last."""
    bad = [s for s in statuses if s.state == "failed" or (s.state == "done" and s.exit_code)]
    follows = PeerFailedError.__name__
    return min(bad, key=lambda s: (s.error == follows, s.time, s.rank), default=None)


def _located(
    run: RunFolder, status: RankStatus, num_ranks: int, statuses: Sequence[RankStatus | None]
) -> RollplexError:
    error = error_of(status)
    if error.exit_code != 1:
        return error
    where = f"rank {status.rank}: " if num_ranks > 1 and not error.message.startswith(f"rank {status.rank}") else ""
    waiting = f" (waiting for {', '.join(status.waiting)})" if status.waiting else ""
    peers = ""
    if isinstance(error, StallError) and num_ranks > 1:
        waiting, peers = "", wait_lines(statuses)
    hint = f"{error.hint}; " if error.hint else ""
    message = f"{where}{error.message}{waiting}{peers}"
    located = type(error)(message, hint=f"{hint}the log is `{run.rank_log(status.rank)}`")
    located.exit_code = error.exit_code
    return located


def wait_lines(statuses: Sequence[RankStatus | None], without: int | None = None, hung: int | None = None) -> str:
    """What every rank was waiting for when it last said so, as the end of a message: one line per rank that waited, and
    one for the rank that hangs."""
    said = [s for s in statuses if s is not None and (s.waiting or s.rank == hung) and s.rank != without]
    lines = [
        f"\n  rank {s.rank}, step {s.step}, phase {s.phase or 'none'}: {'; '.join(s.waiting[:4]) or BETWEEN_WAITS}"
        for s in said[:MAX_RANKS_SHOWN]
    ]
    more = [f"\n  and {len(said) - MAX_RANKS_SHOWN} more ranks"] if len(said) > MAX_RANKS_SHOWN else []
    return "; last words of every rank:" + "".join(lines + more) if lines else ""


def _hung(decisive: RankStatus, statuses: Sequence[RankStatus | None]) -> int:
    """The rank at the end of the chain of ranks that a stalled one waited for: it waits for nobody, or is silent.

    A rank whose every thread is stuck cannot say so: those that wait for it are the ones that time out.
    """
    rank, seen = decisive.rank, set[int]()
    while rank not in seen and rank < len(statuses) and (status := statuses[rank]) is not None:
        seen.add(rank)
        if status.state in ALIVE:
            break
        awaited = next((found for item in status.waiting if (found := AWAITED.search(item))), None)
        if awaited is None:
            break
        rank = int(awaited.group(1))
    return rank


def _silent_stall(run: RunFolder, rank: int, statuses: Sequence[RankStatus | None]) -> StallError:
    status = statuses[rank]
    if status is None:
        return StallError(f"rank {rank} never said anything{wait_lines(statuses)}", hint=f"see `{run.rank_log(rank)}`")
    age_s = max(0.0, time.time() - status.time)
    where = f"in step {status.step}, phase {status.phase or 'none'}"
    return StallError(
        f"rank {rank} hangs: it has not moved for {age_s:.0f} s, {where}{wait_lines(statuses, hung=rank)}",
        hint=f"the log is `{run.rank_log(rank)}`",
    )


def _first_failures(run: RunFolder, num_nodes: int) -> list[tuple[int, int, int]]:
    """Exit code, rank on its node and process id (-1 if unknown) of the worker that each node saw end first."""
    found = []
    for node in range(num_nodes):
        match = next((m for line in read_tail(run.node_log(node), 400) if (m := FIRST_FAILURE.search(line))), None)
        if match is not None:
            found.append((int(match.group(1)), int(match.group(2)), int(match.group(3) or -1)))
    return found


def _culprit(
    failures: Sequence[tuple[int, int, int]],
    statuses: Sequence[RankStatus | None],
    silent: Sequence[int],
    num_nodes: int,
) -> tuple[int, int]:
    """Rank and exit code of the worker that ended first; (-1, 0) if none was seen to.

    Among nodes a rank that left no reason comes before one that did: the latter may follow. Of several without a
    reason the one that fell silent first counts: the supervisors end the others `LAST_WORDS_S` later.
    """

    def order(item: tuple[int, int]) -> tuple[bool, float]:
        status = statuses[item[0]] if item[0] < len(statuses) else None
        return item[0] not in silent, status.time if status is not None else math.inf

    found = []
    for code, local_rank, pid in failures:
        # Node numbers of the scheduler and of torchrun differ: the process id leads to the rank.
        by_pid = [s.rank for s in statuses if s is not None and s.pid == pid]
        if by_pid or num_nodes == 1:
            found.append((by_pid[0] if by_pid else local_rank, code))
    return min(found, key=order, default=(-1, 0))


def _died(run: RunFolder, rank: int, code: int, statuses: Sequence[RankStatus | None]) -> RunFailedError:
    log = run.rank_log(rank) if _tail_lines(run.rank_log(rank)) else run.launcher_log
    how = f"ended with exit code {code}" if code > 0 else "ended"
    if code < 0:
        how = f"was {SIGNALS.get(code, 'ended')} by signal {-code}"
    hint = f"the log is `{log}`"
    if code == -9:
        hint = f"signal 9 often comes from the kernel when memory runs out; {hint}"
    text = f"rank {rank} {how} and left no reason{log_tail(log)}{wait_lines(statuses)}"
    # An exit code of its own is likely to come again; a signal or a lost node is not.
    return RunFailedError(text, hint=hint) if code > 0 else RankLostError(text, hint=hint)


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
