"""What a run's seconds went into: phases, tasks, and what ran beside the decode."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from rollplex_cli.report.series import number, printable, show
from rollplex_cli.report.spans import Span, busy_s, by_step, common_s, intervals_of, tasks_only

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollplex_cli.report.series import Row

PHASES = ("GENERATE", "LEARN", "UPDATE", "PUBLISH")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """One phase over all steps."""

    phase: str
    mean_s: float
    median_s: float
    share: float
    """Of the summed step time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTime:
    """One kind of task over all steps and ranks."""

    task: str
    lane: str
    planned: float | None
    """How many of them a rank runs in a step according to the plan; None where the plan does not say."""
    per_step: float
    """How many a rank ran in a step, mean over steps and ranks."""
    busy_s: float
    """Seconds a step in which at least one of them ran, mean over steps and ranks."""
    beside_decode: float | None
    """Share of those seconds in which the rollout decoded; None for the decode itself."""


def phase_times(rows: Sequence[Row]) -> list[PhaseTime]:
    """Phases in order, and last the time of a step that no phase accounts for (`other`)."""
    steps = [row for row in rows if isinstance(row.get("phase_s"), dict) and number(row, "step_s") is not None]
    if not steps:
        return []
    extra = sorted({str(name) for row in steps for name in row["phase_s"]} - set(PHASES))
    seconds = {
        name: [number(row["phase_s"], name) or 0.0 for row in steps]
        for name in (*PHASES, *extra)
        if any(number(row["phase_s"], name) for row in steps)
    }
    whole = [number(row, "step_s") or 0.0 for row in steps]
    rest = [max(0.0, step - math.fsum(parts[i] for parts in seconds.values())) for i, step in enumerate(whole)]
    seconds["other"] = rest
    total = math.fsum(whole) or 1.0
    return [
        PhaseTime(
            phase=name,
            mean_s=statistics.fmean(parts),
            median_s=statistics.median(parts),
            share=math.fsum(parts) / total,
        )
        for name, parts in seconds.items()
    ]


def task_times(spans: Sequence[Span], plan: Row | None = None) -> list[TaskTime]:
    """Kinds of tasks in the order in which they first ran, beside what plan.json expected."""
    tasks = tasks_only(spans)
    steps = by_step(tasks)
    decode = {key: intervals_of(s for s in members if s.name == "decode") for key, members in steps.items()}
    times = []
    for kind in dict.fromkeys(span.name for span in tasks):
        own = {key: [span for span in members if span.name == kind] for key, members in steps.items()}
        busy = {key: busy_s(intervals_of(members)) for key, members in own.items()}
        total = math.fsum(busy.values())
        beside = math.fsum(common_s(intervals_of(members), decode[key]) for key, members in own.items())
        times.append(
            TaskTime(
                task=kind,
                lane=next(span.lane for span in tasks if span.name == kind),
                planned=number(plan or {}, f"tasks.per_rank.{kind}"),
                per_step=sum(len(members) for members in own.values()) / len(steps),
                busy_s=total / len(steps),
                beside_decode=None if kind == "decode" or total == 0 else beside / total,
            )
        )
    return times


def as_json(times: Sequence[PhaseTime | TaskTime]) -> list[dict[str, Any]]:
    """Rows as dictionaries."""
    return [asdict(row) for row in times]


def phase_table(times: Sequence[PhaseTime]) -> Table:
    """Phases as a table."""
    table = Table(title="Where a step's time goes", title_justify="left")
    table.add_column("phase")
    for heading in ("mean s", "median s", "share"):
        table.add_column(heading, justify="right")
    for row in times:
        table.add_row(Text(printable(row.phase)), show(row.mean_s), show(row.median_s), f"{row.share:.1%}")
    return table


def task_table(times: Sequence[TaskTime]) -> Table:
    """Tasks as a table."""
    table = Table(title="Tasks of a rank in a step", title_justify="left")
    table.add_column("task")
    table.add_column("lane")
    for heading in ("planned", "run", "busy s", "beside decode"):
        table.add_column(heading, justify="right")
    for row in times:
        beside = "" if row.beside_decode is None else f"{row.beside_decode:.0%}"
        counts = (show(row.planned, ".0f"), f"{row.per_step:.4g}")
        table.add_row(Text(row.task), Text(printable(row.lane)), *counts, show(row.busy_s), beside)
    return table


def sample_table(samples: Sequence[Row]) -> Table:
    """A few responses with their rewards. Their text is shown as it is: never as markup, never as terminal codes."""
    table = Table(title="Latest responses", title_justify="left")
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("question", max_width=48, overflow="fold")
    table.add_column("response", max_width=48, overflow="fold")
    table.add_column("reward", justify="right", no_wrap=True)
    for row in samples:
        table.add_row(
            Text(printable(row.get("step", "-"))),
            Text(printable(row.get("question", row.get("prompt", "")))),
            Text(printable(row.get("response", ""))),
            show(number(row, "reward"), ".2f"),
        )
    return table
