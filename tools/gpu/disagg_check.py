"""Workloads on the GPUs of one node, `rollplex` against `colocate` and `disagg`, in one call.

    python tools/gpu/disagg_check.py --workload llava-video --out results/
    python tools/gpu/disagg_check.py --model tiny --device cpu --workload star --steps 1 --prompts 4 --out /tmp/results

It is `rollplex bench --baseline colocate --baseline disagg` with the settings of a benchmark. The engines are built
twice: co-located on every GPU, then with half of the GPUs to decode and half to train. OUT/run is the run folder, and
OUT/MODEL-WORKLOAD-disagg.json the result of each; where `--limit` ends the second part, the first part's is there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from limited import log_ends, run_limited


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen25vl7b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--train-tp", type=int, help="of the co-located engines [default: the number of GPUs]")
    parser.add_argument("--workload", action="append", required=True, help="repeatable")
    parser.add_argument("--policy", action="append", default=[])
    parser.add_argument("--baseline", action="append", default=[], help="default: both; none with several policies")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of each schedule, after one of warm-up")
    parser.add_argument("--prompts", type=int, default=8, help="prompt groups a step")
    parser.add_argument("--limit", type=float, default=470.0, metavar="SECONDS")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def command(arguments: argparse.Namespace, run_dir: Path) -> list[str]:
    """The benchmark's command line."""
    train_tp = arguments.train_tp or (1 if arguments.device == "cpu" else arguments.gpus)
    overrides = [
        f"model.config={arguments.model}",
        "model.init=random",
        f"topology.device={arguments.device}",
        f"topology.ranks_per_node={arguments.gpus}",
        f"topology.train_tp={train_tp}",
        "topology.rollout_tp=1",
        f"algorithm.prompts_per_step={arguments.prompts}",
        "task.options.num_train_clips=8",
        "task.options.num_validation_clips=2",
        "task.options.num_eval_clips=2",
        "evaluation.num_samples=0",
        "guards.parity_limit=1.0",
        # A card that has the memory: nothing is computed twice to save it.
        "schedule.suffix_kept_layers=null",
        "schedule.early_groups=true",
        *(["rollout.max_new_tokens=16"] if arguments.device == "cpu" else ["memory.budget_gib=null"]),
        *arguments.sets,
    ]
    profile = "tiny" if arguments.device == "cpu" else "qwen25vl7b"
    argv = ["bench", "--profile", profile, "--plain"]
    argv += ["--steps", str(arguments.steps), "--run-dir", str(run_dir)]
    for option, values in (
        ("--workload", arguments.workload),
        ("--baseline", arguments.baseline or ([] if len(arguments.policy) > 1 else ["colocate", "disagg"])),
        ("--policy", arguments.policy),
        ("--set", overrides),
    ):
        argv += [part for value in values for part in (option, value)]
    return argv


def main() -> int:
    """Run the benchmark, say when its parts began and ended, and keep its result."""
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    run_dir = arguments.out / "run"
    shutil.rmtree(run_dir, ignore_errors=True)
    argv = command(arguments, run_dir)
    print("$ rollplex", " ".join(argv), flush=True)
    ended = run_limited(argv, arguments.limit)
    keep(run_dir, arguments)
    for name, tail in log_ends(run_dir) if ended.code or ended.late else ():
        print(f"== end of {name}\n{tail}", flush=True)
    return 124 if ended.late else ended.code


def keep(run_dir: Path, arguments: argparse.Namespace) -> None:
    """Copy what was measured, a file per workload: of the first part, and of the second as far as it came."""
    found = {}
    for path in (run_dir / "bench_result.json", run_dir / "disagg" / "bench_result.json"):
        if path.exists():
            result = json.loads(path.read_text(encoding="utf-8"))
            found |= result.get("workloads", {result["results"][0]["workload"]: result})
    for workload, result in found.items():
        kept = arguments.out / f"{arguments.model}-{workload}-disagg.json"
        kept.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"== {workload}", flush=True)
        show(result)


def show(result: dict[str, object]) -> None:
    """A line per variant."""
    rows = result["results"]
    assert isinstance(rows, list)
    for row in rows:
        phases = " ".join(f"{name} {seconds:.2f}" for name, seconds in row["phase_s"].items())
        ends = row["ratio_ci95"]
        ratios = "; ".join(
            f"{name} {value:.3f}" + (" [{:.3f}, {:.3f}]".format(*ends[name]) if ends[name] else "")
            for name, value in row["ratio"].items()
        )
        print(f"{row['variant']:<20} {row['step_s_median']:.2f} s  {phases}  ratios: {ratios}", flush=True)
        print(f"{'':<20} layout {row['layout']}, peak {row['peak_bytes']} bytes", flush=True)


if __name__ == "__main__":
    sys.exit(main())
