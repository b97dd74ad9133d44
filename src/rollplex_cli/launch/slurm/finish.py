"""After the tasks of a job: is it queued again? `python -m rollplex_cli.launch.slurm.finish RUN_DIR CODE MAX`.

Prints `requeue` or `end` on stdout for the job script, says why on stderr, and exits with the job's exit code.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import InterruptedRunError, RankLostError
from rollplex_cli.core.log import talk
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.launch.record import read_record, steps_done
from rollplex_cli.launch.slurm.environment import read_environment

if TYPE_CHECKING:
    from rollplex_cli.launch.record import LaunchRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether a job is queued again, and why."""

    requeue: bool
    reason: str


def decide(
    record: LaunchRecord | None,
    *,
    restarts: int,
    max_requeues: int,
    cancelled: bool,
    steps: int,
) -> Decision:
    """Pure.

    Args:
        record: what the supervisor said; None or not `ended` if it was killed itself.
        restarts: how often the job was queued again before, for whatever reason.
        cancelled: the user does not want it to go on.
        steps: steps done now.
    """
    over = record is not None and record.stage == "ended"
    if cancelled:
        return Decision(requeue=False, reason="cancelled by the user")
    if over and record is not None:
        if record.exit_code == 0:
            return Decision(requeue=False, reason="done")
        if record.error not in (InterruptedRunError.__name__, RankLostError.__name__):
            return Decision(requeue=False, reason="it failed in a way that would come again")
    if restarts >= max_requeues:
        return Decision(
            requeue=False, reason=f"queued again {restarts} times already, `slurm.max_requeues` allows no more"
        )
    stuck = record is not None and steps <= record.first_step and restarts > 0
    if stuck and not (over and record is not None and record.error == InterruptedRunError.__name__):
        return Decision(requeue=False, reason=f"a second start in a row ended before step {steps + 1}")
    what = "interrupted" if over and record is not None and record.exit_code == 75 else "lost a process"
    return Decision(requeue=True, reason=f"{what}; queued again, time {restarts + 1} of at most {max_requeues}")


def main(argv: list[str] | None = None) -> int:
    """Decide for the run in the arguments."""
    folder, code, most = sys.argv[1:] if argv is None else argv
    run = RunFolder(Path(folder))
    task, record = read_environment(os.environ), read_record(run)
    if record is not None and (record.job_id, record.restart) != (task.job_id, task.restart):
        record = None  # this start did not come so far as to say anything
    decision = decide(
        record,
        restarts=task.restart,
        max_requeues=int(most),
        cancelled=run.cancelled.exists(),
        steps=steps_done(run),
    )
    talk(f"job {task.job_id}: {decision.reason}")
    sys.stdout.write("requeue\n" if decision.requeue else "end\n")
    if record is not None and record.exit_code is not None:
        return record.exit_code
    return int(code) or 1


if __name__ == "__main__":
    sys.exit(main())
