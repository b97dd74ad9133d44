"""Jobs of two, four and eight GPUs of one node, in parts that each end within ten minutes.

    python tools/gpu/multi_gpu.py x4 --dry-run
    python tools/gpu/multi_gpu.py x4 --part star --out results/
    python tools/gpu/multi_gpu.py x8 --out results/

`x4` is jobs/bench/h200x4_7b.yaml (train TP 4, rollout TP 2), `x2` the same with both degrees 2, `x8`
jobs/bench/h200x8_32b.yaml (train TP 8, rollout TP 4, 80 GB). Without `--part` all parts run, one after the other.
OUT/JOB-PART.json is what a part found; after a failure the ends of the ranks' logs and what every rank waited for are
printed, collectives included.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from limited import log_ends, run_limited

DOES_NOT_FIT = 3
ABLATIONS = ("no-kv-release", "no-reference-release", "no-snapshot-release", "no-optimizer-chunks")


@dataclass(frozen=True)
class Part:
    """One command of a job."""

    name: str
    command: tuple[str, ...]
    """Arguments of `rollplex`."""
    ends_with: int = 0
    """Exit code that it should have."""
    keeps: str = "bench_result.json"
    """File of the run folder that is the result; empty where standard output is."""


def bench(name: str, profile: str, workload: str, steps: int, baselines: tuple[str, ...], *sets: str) -> Part:
    """A benchmark of one workload."""
    argv = ["bench", "--profile", profile, "--plain", "--workload", workload, "--steps", str(steps)]
    for option, values in (("--baseline", baselines), ("--set", sets)):
        argv += [part for value in values for part in (option, value)]
    return Part(name, tuple(argv))


def fifty(profile: str, *sets: str) -> Part:
    """Fifty short steps, which a launch out of order would not survive."""
    short = (*sets, "rollout.max_new_tokens=128", "runtime.max_steps=50", "target=null")
    argv = ("train", "--profile", profile, "--plain", *(part for s in short for part in ("--set", s)))
    return Part("fifty-steps", argv, keeps="metrics.jsonl")


def two() -> list[Part]:
    """Decode's collectives beside the trainer's on two GPUs, and what that does to a step."""
    profile, degrees = "jobs/bench/h200x4_7b.yaml", ("topology.ranks_per_node=2", "topology.train_tp=2")
    sets = (*degrees, "algorithm.prompts_per_step=8", "memory.host_budget_gib=240")
    against = ("colocate", "colocate_same_work")
    return [fifty(profile, *sets), bench("star", profile, "star", 2, against, *sets)]


def four() -> list[Part]:
    """Fifty steps without a hang; two workloads against all baselines; the rollout's degree."""
    profile = "jobs/bench/h200x4_7b.yaml"
    against = ("colocate", "colocate_same_work", "disagg")
    parts = [fifty(profile)]
    parts += [bench(workload, profile, workload, 2, against) for workload in ("star", "llava-video")]
    for degree in (1, 4):
        name, override = f"rollout-tp-{degree}", f"topology.rollout_tp={degree}"
        parts.append(bench(name, profile, "star", 2, ("colocate", "colocate_same_work"), override))
    return parts


def eight() -> list[Part]:
    """Plans for both sizes of cards, the ablations, plan against measurement, two workloads, matched TP."""
    profile = "jobs/bench/h200x8_32b.yaml"
    plan = ("profile-memory", "--profile", profile, "--json")
    left_out = tuple(part for name in (*ABLATIONS, "naive") for part in ("--ablate", name))
    large = ("--set", "memory.budget_gib=131", "--set", "schedule.suffix_kept_layers=null")
    parts = [
        Part("plan-80gb", (*plan, *left_out), keeps=""),
        Part("plan-141gb", (*plan, *large), keeps=""),
        Part("plan-resident", (*plan, "--set", "memory.residency=resident"), ends_with=DOES_NOT_FIT, keeps=""),
        Part("measured", (*plan, "--measure"), keeps=""),
    ]
    for workload in ("star", "llava-video"):
        parts.append(bench(workload, profile, workload, 3, ("colocate",)))
        # A rank that only trains holds twice the training shard: it can keep fewer layers' activations within 80 GB,
        # and the boundary of one prompt at a time.
        fits = ("schedule.suffix_kept_layers=4", "schedule.prefix_pack_tokens=0")
        parts.append(bench(f"{workload}-disagg", profile, workload, 3, ("disagg",), *fits))
    parts.append(bench("matched-tp", profile, "star", 3, ("colocate",), "topology.rollout_tp=8"))
    return parts


JOBS = {"x2": two, "x4": four, "x8": eight}


def main() -> int:
    """Run the parts asked for; 0 if all of them ended as they should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=tuple(JOBS))
    parser.add_argument("--part", action="append", default=[], help="repeatable [default: all]")
    parser.add_argument("--limit", type=float, default=570.0, metavar="SECONDS", help="of one part")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE", help="for every part")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--dry-run", action="store_true", help="print the commands and run nothing")
    arguments = parser.parse_args()
    parts = {part.name: part for part in JOBS[arguments.job]()}
    unknown = [name for name in arguments.part if name not in parts]
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; parts are {', '.join(parts)}")
    good = True
    for name in arguments.part or parts:
        run_dir = arguments.out / f"{arguments.job}-{name}"
        argv = command(parts[name], run_dir, arguments.sets)
        print("$ rollplex", shlex.join(argv), flush=True)
        if not arguments.dry_run:
            good &= run(parts[name], argv, run_dir, arguments.limit)
    return 0 if good else 1


def command(part: Part, run_dir: Path, sets: list[str]) -> list[str]:
    """Arguments of `rollplex` for a part."""
    runs = not part.command[0].startswith("profile-memory") or "--measure" in part.command
    where = ["--run-dir", str(run_dir)] if runs else []
    return [*part.command, *(word for value in sets for word in ("--set", value)), *where]


def run(part: Part, argv: list[str], run_dir: Path, limit_s: float) -> bool:
    """Run one part within its limit and keep what it found. Whether it ended as it should."""
    shutil.rmtree(run_dir, ignore_errors=True)
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    ended = run_limited(argv, limit_s, show=bool(part.keeps))
    kept = run_dir.parent / f"{run_dir.name}.json"
    if not part.keeps:
        kept.write_text("".join(ended.lines), encoding="utf-8")
    elif (run_dir / part.keeps).exists():
        kept.write_text(found(run_dir / part.keeps), encoding="utf-8")
    good = ended.code == part.ends_with
    print(f"== {part.name}: exit code {ended.code} after {ended.seconds:.0f} s", flush=True)
    if not good:
        show_failure(run_dir)
    return good


def found(path: Path) -> str:
    """A result as JSON text; of a benchmark with the efficiency of its decode windows."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return json.dumps([json.loads(line) for line in text.splitlines()], indent=1) + "\n"
    result: dict[str, Any] = json.loads(text)
    result["window_efficiency"] = window_efficiency(result)
    print("window efficiency", result["window_efficiency"], flush=True)
    return json.dumps(result, indent=1) + "\n"


def window_efficiency(result: dict[str, Any]) -> float | None:
    """Decode's share of its own rate plus the trainer's, over the decode window of a step: (seconds of decode alone +
    seconds of training that the window took from LEARN) / seconds of the window. 1 is time slicing. Against the same
    work one after the other, so nothing but the overlap differs; medians of the measured pairs."""
    rows = {row["variant"]: row["phase_s"] for row in result["results"]}
    apart, beside = rows.get("colocate_same_work"), rows.get("rollplex")
    if apart is None or beside is None:
        return None
    gained = apart["LEARN"] - beside["LEARN"]
    return float((apart["GENERATE"] + gained) / beside["GENERATE"])


def show_failure(run_dir: Path) -> None:
    """What every rank waited for, and the ends of their logs."""
    for path in sorted(run_dir.glob("**/status/*.json")):
        status = json.loads(path.read_text(encoding="utf-8"))
        print(f"== {path.name}: {status.get('message')}", *status.get("waiting", []), sep="\n   ", flush=True)
    for name, tail in log_ends(run_dir):
        print(f"== end of {name}\n{tail}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
