"""A run as the report sees it: metric rows in order, events, plan and profile, whatever of them is there."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import RollplexError, UsageError
from rollplex_cli.core.events import read_events
from rollplex_cli.core.files import read_json, read_jsonl
from rollplex_cli.core.paths import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from rollplex_cli.profile.schema import Profile

WINDOW = 10
"""Steps of the trailing mean where the profile names no target."""

Row = dict[str, Any]
"""One line of metrics.jsonl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    """Everything the report reads from a run folder."""

    folder: RunFolder
    rows: list[Row] = field(default_factory=list)
    """One per step, ascending."""
    events: list[Row] = field(default_factory=list)
    """Spans of all ranks, by start."""
    plan: Row = field(default_factory=dict)
    profile: Profile | None = None
    """None where profile.yaml is missing or of another version."""

    @property
    def name(self) -> str:
        """The profile's name, else the folder's."""
        return self.profile.name if self.profile is not None else self.folder.root.name

    @property
    def target(self) -> float | None:
        """Mean reward that the profile asks for."""
        return self.profile.target.reward_mean if self.profile is not None and self.profile.target is not None else None

    @property
    def window(self) -> int:
        """Steps of the trailing mean."""
        return self.profile.target.window if self.profile is not None and self.profile.target is not None else WINDOW

    @property
    def schedule(self) -> str:
        """Schedule of steps that do not name one themselves."""
        return self.profile.schedule.name if self.profile is not None else ""


def load_run(root: Path) -> RunData:
    """Read a run folder. Raises UsageError where `root` is none; a part that is missing or torn is left out."""
    folder = RunFolder(root)
    if not root.is_dir() or not (folder.profile.exists() or folder.metrics.exists() or folder.events_dir.is_dir()):
        raise UsageError(f"no run folder: {root}", hint="`rollplex train` prints the folder it writes to")
    events = [row for path in sorted(folder.events_dir.glob("rank*.jsonl")) for row in read_events(path)]
    return RunData(
        folder=folder,
        rows=merge_rows([*read_jsonl(folder.metrics), *evaluation_rows(read_jsonl(folder.evaluations))]),
        events=sorted(events, key=lambda row: number(row, "t0") or 0.0),
        plan=read_json(folder.plan) or {},
        profile=_read_profile(folder.profile),
    )


def _read_profile(path: Path) -> Profile | None:
    # Loaded here because pydantic takes a noticeable part of a second.
    from rollplex_cli.profile.load import load_profile

    try:
        return load_profile(str(path), [])
    except RollplexError:
        return None


def merge_rows(rows: Iterable[Row]) -> list[Row]:
    """One row per step, ascending: a resumed run writes the steps after its checkpoint again, and the later row holds.

    Rows without a whole number as step are left out.
    """
    by_step: dict[int, Row] = {}
    for row in rows:
        step = row.get("step")
        if isinstance(step, int) and not isinstance(step, bool):
            by_step[step] = {**by_step.get(step, {}), **row}
    return [by_step[step] for step in sorted(by_step)]


def evaluation_rows(evaluations: Iterable[Row]) -> list[Row]:
    """Lines of evaluations.jsonl as parts of the rows of their steps, under `eval`."""
    return [{"step": row.get("step"), "eval": row} for row in evaluations]


def number(row: Row, key: str) -> float | None:
    """A finite number of a row, `a.b` looking into dictionaries; None for anything else."""
    value: Any = row
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def format_share(row: Row) -> float | None:
    """Share of responses in the asked form."""
    return number(row, "reward_parts_earned.format")


def has_kl(rows: Sequence[Row]) -> bool:
    """Whether a reference took part: without one the KL is missing or exactly zero at every step."""
    return any(number(row, "kl") for row in rows)


def steps_of(rows: Sequence[Row]) -> list[Row]:
    """The rows of training steps, without rows that hold an evaluation only."""
    return [row for row in rows if number(row, "reward_mean") is not None]


def trailing_means(values: Sequence[float], window: int) -> list[float]:
    """Mean of the last `window` values at each place, of fewer at the beginning."""
    means = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        means.append(math.fsum(part) / len(part))
    return means


def reward_means(rows: Sequence[Row], window: int) -> list[float]:
    """Trailing mean reward after each training step."""
    return trailing_means([number(row, "reward_mean") or 0.0 for row in steps_of(rows)], window)


def heldout_points(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """(step, accuracy on the held-out split) of every evaluation."""
    found = [(int(row["step"]), number(row, "eval.heldout_accuracy")) for row in rows]
    return [(step, accuracy) for step, accuracy in found if accuracy is not None]


def target_reached(rows: Sequence[Row], target: float | None, window: int) -> bool | None:
    """Whether the mean reward of the last `window` steps reached the target; None without a target."""
    if target is None:
        return None
    means = reward_means(rows, window)
    return len(means) >= window and means[-1] >= target


SPARK_BLOCKS = "\u2581\u2582\u2583\u2584\u2585\u2586\u2587\u2588"
SPARK_ASCII = "_.-=+*#@"


def sparkline(values: Sequence[float], width: int, *, unicode: bool = True) -> str:
    """At most `width` of the latest values as one character each, lowest to highest of those shown."""
    shown = list(values)[-width:]
    if not shown:
        return ""
    blocks = SPARK_BLOCKS if unicode else SPARK_ASCII
    low, high = min(shown), max(shown)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((value - low) * scale)] for value in shown)


def show(value: float | None, spec: str = ".3f") -> str:
    """A number for a table, `-` where there is none."""
    return "-" if value is None else format(value, spec)


def printable(text: object) -> str:
    """Text of models and data made harmless for a terminal: everything unprintable is shown as an escape."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in str(text))
