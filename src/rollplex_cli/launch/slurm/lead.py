"""Does the stop signal come early enough? The lead time of the job against what steps and checkpoints took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex_cli.core.events import read_events
from rollplex_cli.core.files import read_jsonl

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder

SCHEDULER_S = 5.0
"""From Slurm's decision to the handler in the last rank, and from the checkpoint to the end of the processes."""
MIN_STEPS = 2
"""Measured steps from which on there is something to say; the first one also warms up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds that a stop at a step boundary takes."""

    step_s: float
    """The longest step: a signal may come just after its start."""
    save_s: float | None
    """The longest checkpoint; None before the first."""

    @property
    def needed_s(self) -> float:
        """Lead time that covers a step, a checkpoint and the scheduler."""
        return self.step_s + (self.save_s or 0.0) + SCHEDULER_S


def measure(run: RunFolder) -> Measured | None:
    """What the run's own files say; None before enough steps."""
    steps = [float(row["step_s"]) for row in read_jsonl(run.metrics) if isinstance(row.get("step_s"), int | float)]
    if len(steps) < MIN_STEPS:
        return None
    saves = [e["t1"] - e["t0"] for e in read_events(run.events(0)) if e["name"] == "checkpoint" and "t1" in e]
    return Measured(step_s=max(steps[1:]), save_s=max(saves, default=None))


def lead_warning(measured: Measured | None, lead_s: float) -> str | None:
    """What is wrong with a lead time, with the numbers; None if it is enough."""
    if measured is None or measured.needed_s <= lead_s:
        return None
    save = "no checkpoint was written yet"
    if measured.save_s is not None:
        save = f"a checkpoint up to {measured.save_s:.1f} s"
    return (
        f"the stop signal comes {lead_s:.0f} s before the time limit, a step takes up to {measured.step_s:.1f} s and "
        f"{save}: set `slurm.stop_lead_s` to at least {measured.needed_s + 0.5:.0f}"
    )
