"""Benchmark several workloads on one GPU in one process, so that the engines are built once.

    python tools/gpu/sweep.py --model qwen25vl7b --workload clevrer --workload math --steps 3 --out results/
    python tools/gpu/sweep.py --model tiny --device cpu --workload star --steps 1 --out /tmp/results

Writes one JSON per workload (the contents of a benchmark's bench_result.json), and `tasks.json` with the median
seconds of each kind of task; prints a table last. `rollplex bench` with several workloads measures the same through the
command line, without the tasks' medians and the profile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src"))

from rollplex_cli.core.files import read_jsonl, write_atomic  # noqa: E402
from rollplex_cli.core.paths import RunFolder  # noqa: E402
from rollplex_cli.profile.dump import resolved_yaml  # noqa: E402
from rollplex_cli.profile.load import load_profile  # noqa: E402


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen25vl7b")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--workload", action="append", required=True)
    parser.add_argument("--policy", action="append", default=[])
    parser.add_argument("--baseline", action="append", default=[])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8, help="prompt groups a step")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--profile-tasks", action="store_true", help="write a profile of the trainer's tasks first")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def overrides(arguments: argparse.Namespace) -> list[str]:
    """What turns a shipped profile into the benchmark's job."""
    common = [
        f"model.config={arguments.model}",
        "model.init=random",
        f"topology.device={arguments.device}",
        "topology.ranks_per_node=1",
        "topology.train_tp=1",
        f"algorithm.prompts_per_step={arguments.prompts}",
        "task.options.num_train_clips=8",
        "task.options.num_validation_clips=2",
        "task.options.num_eval_clips=2",
        "target=null",
        "guards.parity_limit=1.0",
    ]
    if arguments.device == "cpu":
        return [*common, "rollout.max_new_tokens=16", *arguments.sets]
    # The profile is made for 80 GB cards.
    room = ["memory.budget_gib=null", "schedule.early_groups=true", "schedule.suffix_kept_layers=null"]
    return [*common, *room, *arguments.sets]


def main() -> None:
    """Prepare, build the engines, run every workload."""
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    base = "tiny" if arguments.device == "cpu" else "qwen25vl7b"
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder))
        run.make()
        write_atomic(run.profile, resolved_yaml(load_profile(base, overrides(arguments))))
        write_atomic(run.command, " ".join(["python", *sys.argv]) + "\n")
        from rollplex_cli.launch.run_folder import git_revision
        from rollplex_cli.runtime.prepare import prepare

        write_atomic(run.git, git_revision() + "\n")
        prepare(run)
        print(f"prepared after {time.monotonic() - started:.0f} s", flush=True)
        measure(arguments, run, started)


def measure(arguments: argparse.Namespace, run: RunFolder, started: float) -> None:
    """Every workload with one set of engines."""
    from rollplex_cli.core.log import setup_logging
    from rollplex_cli.runtime.assembly.build import open_control, open_rank
    from rollplex_cli.runtime.bench.run import run_bench

    setup_logging()
    with open_control(run, 0) as (control, machine), open_rank(run, control, machine) as rank:
        print(f"engines built after {time.monotonic() - started:.0f} s", flush=True)
        if arguments.profile_tasks:
            profile_tasks(rank, arguments)
        for workload in arguments.workload:
            request = {
                "baselines": arguments.baseline or ["colocate"],
                "steps": arguments.steps,
                "workloads": [workload],
                "policies": arguments.policy or ["auto"],
            }
            run.bench.write_text(json.dumps(request), encoding="utf-8")
            first_span = len(read_jsonl(run.events(0)))
            run_bench(rank)
            result = json.loads(run.bench_result.read_text(encoding="utf-8"))
            result["tasks"] = task_medians(read_jsonl(run.events(0))[first_span:])
            text = json.dumps(result, indent=1) + "\n"
            write_atomic(arguments.out / f"{arguments.model}-{workload}.json", text)
            show(result, time.monotonic() - started)


def task_medians(spans: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Count and median seconds of each kind of task, over all variants."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        if "t0" in span and "t1" in span:
            seconds[str(span.get("kind") or span.get("name"))].append(span["t1"] - span["t0"])
    return {kind: {"count": len(s), "median_s": statistics.median(s)} for kind, s in seconds.items()}


def show(result: dict[str, Any], after_s: float) -> None:
    """A few lines of a result."""
    print(f"== {result['results'][0]['workload']} after {after_s:.0f} s, bound {result['bound_s']}", flush=True)
    for row in result["results"]:
        phases = " ".join(f"{name} {seconds:.2f}" for name, seconds in row["phase_s"].items())
        ratios = " ".join(f"{name} {value:.3f}{_interval(row, name)}" for name, value in row["ratio"].items())
        print(f"{row['variant']:<20} {row['step_s_median']:.2f} s  {phases}  ratios: {ratios}", flush=True)
    for m in result["co_run"]:
        print("co-run", {k: round(v, 3) if isinstance(v, float) else v for k, v in m.items()}, flush=True)
    print({kind: (row["count"], round(row["median_s"], 3)) for kind, row in result["tasks"].items()}, flush=True)


def _interval(row: dict[str, Any], name: str) -> str:
    """The 95 % interval of a ratio, in brackets."""
    ends = row["ratio_ci95"][name]
    return f" [{ends[0]:.3f}, {ends[1]:.3f}]" if ends else ""


def profile_tasks(rank: Any, arguments: argparse.Namespace) -> None:
    """Operators of one group's training, by device time and by host time."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from rollplex_cli.plan.workloads import WORKLOADS
    from rollplex_cli.rl.losses import LossSettings, policy_loss
    from rollplex_cli.rl.packing import pack_suffix
    from rollplex_cli.runtime.bench.prompts import draw_inputs

    prompt = draw_inputs(rank, WORKLOADS[arguments.workload[0]], 0, 1)[0]
    actor = rank.engines.actor
    responses = [[20 + i % 100 for i in range(60 + 40 * n)] for n in range(8)]
    packed = pack_suffix(prompt.prompt.token_ids[-1], prompt.num_tokens, prompt.rope_delta, responses)
    lines: list[str] = []

    def once() -> None:
        state = actor.prefix(prompt)
        actor.suffix(state, packed, lambda x: policy_loss(x, None, torch.ones(8), None, packed.lengths, LossSettings()))
        actor.prefix_backward(state)
        torch.cuda.synchronize()

    def work() -> None:
        once()
        times = []
        for part in ("prefix", "suffix", "backward"):
            torch.cuda.synchronize()
            start = time.perf_counter()
            if part == "prefix":
                state = actor.prefix(prompt)
            elif part == "suffix":
                actor.suffix(
                    state, packed, lambda x: policy_loss(x, None, torch.ones(8), None, packed.lengths, LossSettings())
                )
            else:
                actor.prefix_backward(state)
            host = time.perf_counter() - start
            torch.cuda.synchronize()
            times.append(f"{part}: host {host:.3f} s, all {time.perf_counter() - start:.3f} s")
        lines.append(f"prompt {prompt.num_tokens}, responses {packed.num_tokens}; " + "; ".join(times))
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            once()
        keys, averages = ("self_cuda_time_total", "self_cpu_time_total"), found.key_averages()
        lines.extend(averages.table(sort_by=key, row_limit=25, max_name_column_width=60) for key in keys)
        actor.discard_gradients()

    rank.trainer_lane.submit(work).result()
    (arguments.out / "task_profile.txt").write_text("\n".join(lines), encoding="utf-8")
    print(lines[0], flush=True)


if __name__ == "__main__":
    main()
