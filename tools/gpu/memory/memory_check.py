"""Check and time managed memory on one GPU, with the real job: plan against measurement, budget, swaps.

    python tools/gpu/memory/memory_check.py --out result.json     3B shape, random weights, one GPU of 80 GB or more
    python tools/gpu/memory/memory_check.py --model tiny --device cpu   the same over the host driver, to try it

1. `rollplex profile-memory --measure` under a budget of 80 GB: the measured peak of every phase within 5 % of the plan.
2. The same job with `memory.residency: resident` under the same budget: ends with exit code 3 and a message.
3. In one process: a KV pool of 20 GiB is unmapped, what is free on the device is filled with NaN, and it is mapped
   again; the same responses are then decoded bit for bit through the captured graphs, and unmap + map take under 50 ms.
   The reference scores a prompt bit-equal after its weights were away.

Prints what it does, a table, and one line of JSON last. Exit code 0 when everything holds.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "src"))

from rollplex_cli.core.events import read_events  # noqa: E402
from rollplex_cli.core.paths import RunFolder  # noqa: E402
from rollplex_cli.core.units import GIB, MIB, format_bytes  # noqa: E402

BUDGET_BYTES = 80e9
TOLERANCE = 0.05
SWAP_LIMIT_MS_PER_20_GIB = 50.0
SWAPS = 3
NEW_TOKENS = 96
SIDES = ("planned_bytes", "measured_bytes")
KV_TOKENS = {"qwen25vl3b": 1_400_000, "qwen25vl7b": 620_000, "tiny": 65_536}
"""Of the job under the budget: as planned it fits, with everything resident it does not."""
SWAP_KV_TOKENS = {"qwen25vl3b": 582_542, "qwen25vl7b": 374_491, "tiny": 16_384}
"""A pool of 20 GiB (16 MiB for the tiny model)."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen25vl3b", choices=sorted(KV_TOKENS))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--only", action="append", choices=("measure", "naive", "swap"), help="repeatable")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds of each part")
    parser.add_argument("--out", type=Path, help="where the JSON goes, too")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser.parse_args()


def overrides(arguments: argparse.Namespace, kv_tokens: int) -> list[str]:
    """What turns a shipped profile into this job."""
    common = [
        f"model.config={arguments.model}",
        "model.init=random",
        f"topology.device={arguments.device}",
        "topology.ranks_per_node=1",
        "topology.train_tp=1",
        "task.options.num_train_clips=8",
        "task.options.num_validation_clips=2",
        "task.options.num_eval_clips=2",
        "target=null",
        "guards.parity_limit=1.0",
        "algorithm.kl_coef=0.01",
        "evaluation.num_samples=0",
        f"rollout.kv_tokens={kv_tokens}",
    ]
    if arguments.device == "cpu":
        return [*common, "algorithm.prompts_per_step=4", "schedule.early_groups=false", *arguments.sets]
    sizes = ["algorithm.prompts_per_step=8", "data.max_prompt_tokens=4096", "rollout.max_new_tokens=512"]
    # 12 bytes of optimizer state for each of 8.3 billion parameters do not fit the host comfortably.
    split = ["optimizer.master=split"] if arguments.model == "qwen25vl7b" else []
    return [*common, *sizes, *split, *arguments.sets]


def base_profile(arguments: argparse.Namespace) -> str:
    """The shipped profile that the job varies."""
    return "tiny" if arguments.device == "cpu" else "qwen25vl7b"


def budget_gib(arguments: argparse.Namespace) -> float:
    """80 GB; on the CPU what the tiny job's regions hold at once, and a little more."""
    return 0.0694 if arguments.device == "cpu" else BUDGET_BYTES / GIB


def rollplex(arguments: argparse.Namespace, *command: str) -> subprocess.CompletedProcess[str]:
    """Run the real command line; its talk is shown as it is."""
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "NO_COLOR": "1", "COLUMNS": "160"}
    argv = [sys.executable, "-m", "rollplex_cli.cli.main", *command]
    started = time.monotonic()
    done = subprocess.run(
        argv, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=arguments.timeout, check=False
    )
    print(f"$ rollplex {' '.join(command)}\n  exit code {done.returncode} after {time.monotonic() - started:.0f} s")
    return done


def job(arguments: argparse.Namespace, *more: str) -> list[str]:
    """`--profile` and `--set` arguments of the job under the budget."""
    keys = [*overrides(arguments, KV_TOKENS[arguments.model]), f"memory.budget_gib={budget_gib(arguments)}", *more]
    return ["--profile", base_profile(arguments), *(part for key in keys for part in ("--set", key))]


def measure(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Plan against measurement."""
    run = work / "measure"
    done = rollplex(arguments, "profile-memory", "--measure", "--json", "--run-dir", str(run), *job(arguments))
    if done.returncode:
        print(done.stderr[-4000:])
        return {"holds": False, "exit_code": done.returncode, "error": done.stderr[-1500:]}
    summary = json.loads(done.stdout)
    rows = summary["measured"]
    for row in rows:
        planned, measured = row["planned_bytes"], row["measured_bytes"]
        print(f"  {row['name']:<10}{format_bytes(planned):>12}{format_bytes(measured):>12}  {row['ratio']:.3f}")
        for item in row["objects"]:
            cells = ["-" if item[side] is None else format_bytes(item[side]) for side in SIDES]
            print(f"    {item['name']:<26}{cells[0]:>12}{cells[1]:>12}")
    updates = [row for row in read_events(RunFolder(run).events(0)) if row["name"] == "memory"]
    driver = {row["phase"]: row["driver_peak_bytes"] for row in updates if row["step"] == updates[-1]["step"]}
    print("  counted by the driver at most:", {phase: format_bytes(size) for phase, size in driver.items()})
    # On a CPU what PyTorch holds is not told apart from the rest of the process.
    holds = arguments.device == "cpu" or all(abs(row["ratio"] - 1) <= TOLERANCE for row in rows)
    within = all(size <= budget_gib(arguments) * GIB for size in driver.values())
    judged = "not judged on a CPU" if arguments.device == "cpu" else holds
    print(f"  within {TOLERANCE:.0%} of the plan: {judged}; within the budget: {within}")
    return {
        "holds": holds and within, "exit_code": 0, "phases": rows, "driver_peak_bytes": driver,
        "peak_bytes": summary["peak_bytes"], "naive_peak_bytes": summary["naive_peak_bytes"],
    }  # fmt: skip


def naive(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Everything resident under the same budget."""
    command = ["train", "--plain", "--run-dir", str(work / "naive"), "--max-steps", "1"]
    done = rollplex(arguments, *command, *job(arguments, "memory.residency=resident"))
    print("  " + "\n  ".join(done.stderr.splitlines()[:6]))
    clean = done.returncode == 3 and "Traceback" not in done.stderr + done.stdout
    # The plan refuses the job; a rank that is started all the same has to come to the same end.
    rank = part(arguments, "naive")
    words = (rank.stdout.strip().splitlines() or [""])[-1]
    print(f"  a rank by itself: exit code {rank.returncode}: {words}")
    if rank.returncode != 3:
        print(rank.stderr[-3000:])
    return {
        "holds": clean and rank.returncode == 3, "exit_code": done.returncode, "message": done.stderr[:1500],
        "rank_exit_code": rank.returncode, "rank_message": words,
    }  # fmt: skip


def part(arguments: argparse.Namespace, name: str) -> subprocess.CompletedProcess[str]:
    """A part of this script in a process of its own."""
    command = [sys.executable, __file__, "--part", name, "--model", arguments.model, "--device", arguments.device]
    command += [item for key in arguments.sets for item in ("--set", key)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=arguments.timeout, check=False)


def swap(arguments: argparse.Namespace, _work: Path) -> dict[str, Any]:
    """Decode before and after the pool was away; in a process of its own."""
    done = part(arguments, "swap")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        print(done.stdout[-2000:], done.stderr[-4000:])
        return {"holds": False, "exit_code": done.returncode, "error": done.stderr[-1500:]}
    result: dict[str, Any] = json.loads(lines[-1])
    fast = arguments.device == "cpu" or result["swap_20_gib_ms"] < SWAP_LIMIT_MS_PER_20_GIB
    equal = result["decode_equal"] and result["reference_equal"]
    print(
        f"  pool of {format_bytes(result['pool_bytes'])}: unmap {result['unmap_ms']:.1f} ms, "
        f"map {result['map_ms']:.1f} ms, for 20 GiB {result['swap_20_gib_ms']:.1f} ms; "
        f"{result['tokens']} tokens equal: {result['decode_equal']}; "
        f"reference equal: {result['reference_equal']}; decode graphs: {result['graphs']}"
    )
    return {**result, "holds": fast and equal and (arguments.device == "cpu" or result["graphs"] > 0)}


@contextlib.contextmanager
def one_rank(arguments: argparse.Namespace, kv_tokens: int, *keys: str) -> Iterator[Any]:
    """The job's only rank with its engines, in this process, in a run folder of its own."""
    from rollplex_cli.core.files import write_atomic
    from rollplex_cli.core.log import setup_logging
    from rollplex_cli.profile.dump import resolved_yaml
    from rollplex_cli.profile.load import load_profile
    from rollplex_cli.runtime.assembly.build import open_control, open_rank
    from rollplex_cli.runtime.prepare import prepare

    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder))
        run.make()
        overridden = [*overrides(arguments, kv_tokens), *keys]
        write_atomic(run.profile, resolved_yaml(load_profile(base_profile(arguments), overridden)))
        prepare(run)
        setup_logging()
        with open_control(run, 0) as (control, machine), open_rank(run, control, machine) as rank:
            yield rank


def swap_part(arguments: argparse.Namespace) -> None:
    """Decode and swap; prints one line of JSON."""
    with one_rank(arguments, SWAP_KV_TOKENS[arguments.model], "memory.budget_gib=null") as rank:
        result = swap_and_compare(rank)
        moves = [row for row in read_events(rank.run.events(0)) if row["name"] == "residency"]
    print(json.dumps(result | swap_times(moves)), flush=True)


def naive_part(arguments: argparse.Namespace) -> int:
    """Build a rank with everything resident; the exit code it would end with, and why."""
    from rollplex_cli.core.errors import RollplexError

    budget = f"memory.budget_gib={budget_gib(arguments)}"
    try:
        with one_rank(arguments, KV_TOKENS[arguments.model], budget, "memory.residency=resident"):
            print("everything fits", flush=True)
            return 0
    except RollplexError as error:
        print(error.message, flush=True)
        return error.exit_code


def swap_and_compare(rank: Any) -> dict[str, Any]:
    """The same decode and the same reference forward, with both objects away in between."""
    from rollplex_cli.core.names import TaskKey, TaskKind
    from rollplex_cli.engines.rollout.base import SamplingSettings
    from rollplex_cli.plan.workloads import WORKLOADS
    from rollplex_cli.runtime.bench.prompts import draw_inputs
    from rollplex_cli.runtime.evaluate import answer_all

    residency, engine, reference = rank.memory.residency, rank.engines.rollout, rank.engines.reference
    inputs = draw_inputs(rank, WORKLOADS["clevrer"], 0, 4)
    limit = min(NEW_TOKENS, rank.profile.rollout.max_new_tokens)
    settings = SamplingSettings(max_new_tokens=limit, temperature=1.0, ignore_eos=True)
    seeds = [[100 * i + n for n in range(8)] for i in range(len(inputs))]

    def decode() -> list[Any]:
        with residency.hold("rollout_kv", "this check"):
            answers = answer_all(engine, inputs, settings, seeds)
            engine.drop_caches()
        return [(response.token_ids, response.logprobs) for responses in answers for response in responses]

    def score() -> str:
        key = TaskKey(TaskKind.REF_PREFIX, 0)
        with residency.lease("reference_weights", key):
            state = reference.prefix(inputs[0])
        digest = hashlib.sha256()
        for pair in state.boundary:
            for tensor in pair:
                digest.update(tensor.float().cpu().numpy().tobytes())
        residency.expect([key])
        residency.task_ended(key)
        residency.release_due()
        residency.expect([key])
        return digest.hexdigest()

    # A first time builds kernels, which takes other paths nowhere but is not measured.
    rank.rollout_lane.submit(decode).result()
    answers, scores = [], []
    for _ in range(SWAPS):
        answers.append(rank.rollout_lane.submit(decode).result())
        scores.append(rank.trainer_lane.submit(score).result())
        rank.trainer_lane.submit(lambda: scribble(residency.manager)).result()
    runner = engine._scheduler.tp_worker.model_runner
    graphs = getattr(getattr(runner, "decode_cuda_graph_runner", None), "graphs", None) or {}
    return {
        "decode_equal": all(answer == answers[0] for answer in answers),
        "reference_equal": len(set(scores)) == 1,
        "tokens": sum(len(tokens) for tokens, _ in answers[0]),
        "graphs": len(graphs) or int(getattr(runner, "decode_cuda_graph_runner", None) is not None),
        "pool_bytes": residency.manager.get("rollout_kv").size_bytes,
    }


def scribble(manager: Any) -> None:
    """Write NaN into what is free on the device, so that nothing can be read that was there before."""
    import torch

    device = torch.device(manager.memory.driver.device)
    room = manager.memory.free_bytes() - 4 * GIB if device.type == "cuda" else 64 * MIB
    blocks = []
    while room >= GIB or (room > 0 and not blocks):
        size = min(room, GIB)
        blocks.append(torch.full((size // 4,), float("nan"), device=device))
        room -= size
    del blocks
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()
        torch.cuda.empty_cache()


def swap_times(moves: list[dict[str, Any]]) -> dict[str, float]:
    """Median milliseconds of the pool's swaps after the first one."""
    pool = [row for row in moves if row["regions"] == ["rollout_kv"]]
    maps = [1000 * row["seconds"] for row in pool if row["mapped"]][-SWAPS:]
    unmaps = [1000 * row["seconds"] for row in pool if not row["mapped"]][-SWAPS:]
    size = pool[-1]["num_bytes"]
    both = statistics.median(maps) + statistics.median(unmaps)
    return {
        "map_ms": statistics.median(maps),
        "unmap_ms": statistics.median(unmaps),
        "swap_20_gib_ms": both * 20 * GIB / size,
    }


def main() -> int:
    """Run the parts; 0 if all of them hold."""
    arguments = parse()
    if arguments.part == "swap":
        swap_part(arguments)
        return 0
    if arguments.part == "naive":
        code = naive_part(arguments)
        sys.stdout.flush()
        # Lanes of a rank that was not built whole are still there.
        os._exit(code)
    results: dict[str, Any] = {"model": arguments.model, "device": arguments.device}
    if arguments.device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
        results["hardware"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    parts = {"measure": measure, "naive": naive, "swap": swap}
    with tempfile.TemporaryDirectory() as work:
        for name, check in parts.items():
            if arguments.only and name not in arguments.only:
                continue
            print(f"== {name}", flush=True)
            try:
                results[name] = check(arguments, Path(work))
            except subprocess.TimeoutExpired:
                results[name] = {"holds": False, "error": f"took more than {arguments.timeout:.0f} s"}
            print(f"  {'HOLDS' if results[name]['holds'] else 'DOES NOT HOLD'}", flush=True)
    text = json.dumps(results)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    return 0 if all(found["holds"] for found in results.values() if isinstance(found, dict)) else 1


if __name__ == "__main__":
    sys.exit(main())
