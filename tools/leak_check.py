"""Does a run's memory stand still? Reads the events of a run folder, every rank for itself.

    .venv/bin/rollplex train --profile tiny --run-dir runs/leak --plain --max-steps 200 \\
        --set model.init=random --set target=null --set evaluation.num_samples=0 --set runtime.checkpoint_every=0 \\
        --set guards.zero_reward_steps=201
    .venv/bin/python tools/leak_check.py runs/leak

At the end of every step after the 20th: each region holds what it held before, byte by byte; what PyTorch gave out (on
a CPU the C heap in use, which its tensors are part of), pinned memory and the resident size of the process do not grow.
Growth is the rise of a straight line (Theil-Sen: the median of all slopes) over the steps compared, so that a single
high or low value decides nothing. Exit code 0 if all of it stands still, 1 if not.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))

from rollplex_cli.core.paths import RunFolder  # noqa: E402
from rollplex_cli.core.units import MIB, format_bytes  # noqa: E402
from rollplex_cli.report.memory.measured import memory_rows  # noqa: E402

TOTALS = ("torch_bytes", "rss_bytes", "pinned_bytes")


def rise(values: list[int]) -> float:
    """Bytes by which a straight line through the values rises from the first to the last (Theil 1950, Sen 1968)."""
    slopes = [(b - a) / (j - i) for (i, a), (j, b) in combinations(enumerate(values), 2)]
    return statistics.median(slopes) * (len(values) - 1)


def faults_of(rows: list[dict[str, Any]], allowed_share: float, allowed_bytes: int) -> list[str]:
    """What grew in the step ends of one rank; empty if nothing did."""
    faults = []
    first = rows[0]["regions"]
    for row in rows[1:]:
        if row["regions"] != first:
            faults.append(f"regions after step {row['step']}: {row['regions']}, after step {rows[0]['step']}: {first}")
            break
    for name in TOTALS:
        values = [int(row[name]) for row in rows]
        grown, limit = rise(values), max(allowed_bytes, allowed_share * values[0])
        print(
            f"  {name:<13} {format_bytes(values[0]):>10} -> {format_bytes(values[-1]):>10}, "
            f"rise {format_bytes(grown)} (allowed {format_bytes(limit)})"
        )
        if grown > limit:
            faults.append(f"{name} rose by {format_bytes(grown)} over {len(rows)} steps")
    return faults


def main() -> int:
    """Compare the step ends of every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--after", type=int, default=20, help="steps that may still grow (caches fill)")
    parser.add_argument("--share", type=float, default=0.01, help="rise allowed, as a share of the first value")
    parser.add_argument("--mib", type=float, default=4.0, help="rise allowed at least, in MiB")
    arguments = parser.parse_args()
    ends = [row for row in memory_rows(RunFolder(arguments.run)) if row["phase"] == "PUBLISH"]
    faults = []
    for rank in sorted({row["rank"] for row in ends}):
        rows = [row for row in ends if row["rank"] == rank and row["step"] > arguments.after]
        if len(rows) < 3:
            faults.append(f"rank {rank}: only {len(rows)} steps after step {arguments.after}")
            continue
        print(f"rank {rank}: steps {rows[0]['step']} to {rows[-1]['step']}, regions {rows[-1]['regions']}")
        faults += [f"rank {rank}: {fault}" for fault in faults_of(rows, arguments.share, int(arguments.mib * MIB))]
    if not ends:
        faults.append(f"no memory was measured in: {arguments.run}")
    for fault in faults:
        print(f"GREW: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
