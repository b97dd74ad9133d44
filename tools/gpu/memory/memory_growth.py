"""Many steps without growth of any memory figure, and a run that ends well when the trainer finds no memory.

    python tools/gpu/memory/memory_growth.py --out growth.json                    100 steps and the full device, one GPU
    python tools/gpu/memory/memory_growth.py --ranks 2 --part full                the second part on two GPUs
    python tools/gpu/memory/memory_growth.py --device cpu --steps 40 --part growth

growth: `--steps` steps of the tiny model in this process, one rank. After each: bytes that PyTorch gave out and holds,
bytes in use on the device, resident size, threads and open files of the process. The largest value of the last 20
steps may not exceed that of steps 21 to 40 by more than the tolerance below. The first 20 steps may grow: kernels are
built and caches fill.

full: the real command line, with a task whose reward function takes what is free on the device, at the last reward of
step 2 on the last rank, when only the trainer has work left. The run must end within 60 s of that, not by a traceback,
with a status of every rank, and say who holds the memory.

A table on stdout, one line of JSON last. Exit code 0 when everything holds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "src"))

from rollplex_cli.core.paths import RunFolder  # noqa: E402
from rollplex_cli.core.status import read_status  # noqa: E402
from rollplex_cli.core.units import MIB, format_bytes  # noqa: E402

SETTLED, WINDOW = 20, 20
"""Steps that may grow, and steps that are compared."""
TOLERANCE = {
    "torch_allocated": 1 * MIB,
    "torch_reserved": 32 * MIB,
    "device_used": 32 * MIB,
    "resident": 48 * MIB,
    "threads": 0,
    "open_files": 0,
}
"""The allocators round; on the CPU the resident size follows the C heap."""
PROMPTS, GROUP_SIZE, FULL_AT_STEP = 4, 4, 2
STOP_LIMIT_S = 60.0

TASK = '''
"""The demo's clips; the reward varies under random weights, and takes the rest of the device at a given call."""

import os
import time
from pathlib import Path

from rollplex_cli.data.tasks import load_task

_shapes = load_task("shapes")
prepare, samples, answer_text, build_base = _shapes.prepare, _shapes.samples, _shapes.answer_text, _shapes.build_base
_calls, _kept = [0], []


def reward(sample, text, finished):
    _calls[0] += 1
    last = int(os.environ.get("RANK", "0")) == int(os.environ.get("WORLD_SIZE", "1")) - 1
    if last and _calls[0] == int(os.environ.get("ROLLPLEX_FULL_AT", "0")):
        import torch

        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        for size in (1 << 30, 1 << 26, 1 << 21):
            try:
                while True:
                    _kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                pass
        Path(os.environ["ROLLPLEX_FULL_MARK"]).write_text(str(time.time()))
    return {"noise": (len(text) % 7) / 7}
'''


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--ranks", type=int, default=1, help="of the second part")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--part", action="append", choices=("growth", "full"), help="repeatable [default: both]")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="write the JSON here too")
    arguments = parser.parse_args()
    arguments.part = arguments.part or ["growth", "full"]
    if arguments.steps < SETTLED + WINDOW:
        parser.error(f"--steps must be at least {SETTLED + WINDOW}")
    if arguments.device == "cpu" and "full" in arguments.part:
        parser.error("`--part full` fills a GPU: leave it out with `--device cpu`")
    return arguments


def overrides(arguments: argparse.Namespace, work: Path, ranks: int, *more: str) -> list[str]:
    """What turns the `tiny` profile into the job."""
    cuda, task = arguments.device == "cuda", work / "full_task"
    task.mkdir(exist_ok=True)
    (task / "task.py").write_text(TASK, encoding="utf-8")
    return [
        f"task.name={task}",
        "model.init=random",
        f"model.dtype={'bfloat16' if cuda else 'float32'}",
        f"topology.device={arguments.device}",
        f"topology.ranks_per_node={ranks}",
        "task.options.num_train_clips=8",
        "task.options.num_validation_clips=2",
        "task.options.num_eval_clips=2",
        f"algorithm.prompts_per_step={PROMPTS * ranks}",
        f"rollout.group_size={GROUP_SIZE}",
        "evaluation.num_samples=0",
        "runtime.checkpoint_every=0",
        "guards.parity_limit=1.0",
        "target=null",
        *more,
        *arguments.sets,
    ]


# -- growth ----------------------------------------------------------------------------------------------------------


def growth(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The figures of every step, and those that grew."""
    from rollplex_cli.profile.dump import resolved_yaml
    from rollplex_cli.profile.load import load_profile
    from rollplex_cli.runtime.assembly.build import open_control, open_rank
    from rollplex_cli.runtime.loop import Run
    from rollplex_cli.runtime.prepare import prepare

    run = RunFolder(work / "growth")
    run.make()
    steps = f"runtime.max_steps={arguments.steps}"
    run.profile.write_text(resolved_yaml(load_profile("tiny", overrides(arguments, work, 1, steps))), encoding="utf-8")
    prepare(run)
    rows: list[dict[str, int]] = []

    class Watched(Run):
        """Takes the figures after each step."""

        def _write(self, step: int, row: dict[str, Any], result: Any) -> None:
            super()._write(step, row, result)
            rows.append(figures(cuda=arguments.device == "cuda"))
            if step % 10 == 0:
                print(f"step {step}: {rows[-1]}", file=sys.stderr, flush=True)

    with open_control(run, 0) as (control, machine), open_rank(run, control, machine) as rank:
        Watched(rank).run()
    grown = {}
    for name, tolerance in TOLERANCE.items():
        if name in rows[0]:
            before = max(row[name] for row in rows[SETTLED : SETTLED + WINDOW])
            after = max(row[name] for row in rows[-WINDOW:])
            shown = format_bytes if name not in ("threads", "open_files") else str
            print(f"{name:<16} steps 21..40 {shown(before):>12}  last {WINDOW} {shown(after):>12}")
            if after > before + tolerance:
                grown[name] = after - before
    return {"steps": len(rows), "grown": grown, "rows": rows, "passed": not grown and len(rows) == arguments.steps}


def figures(*, cuda: bool) -> dict[str, int]:
    """What this process and its device hold now."""
    found = {
        "resident": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "threads": len(os.listdir("/proc/self/task")),
        "open_files": len(os.listdir("/proc/self/fd")),
    }
    if cuda:
        import torch

        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found |= {
            "torch_allocated": torch.cuda.memory_allocated(),
            "torch_reserved": torch.cuda.memory_reserved(),
            "device_used": total - free,
        }
    return found


# -- full ------------------------------------------------------------------------------------------------------------


def full(arguments: argparse.Namespace, work: Path) -> dict[str, Any]:
    """How a run ends whose trainer finds no memory."""
    mark, folder = work / "full_at", RunFolder(work / "full")
    # `colocate`: all decode is over when the last reward is computed.
    more = ("schedule.name=colocate", "runtime.max_steps=6", "schedule.early_groups=false")
    sets = [part for key in overrides(arguments, work, arguments.ranks, *more) for part in ("--set", key)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "ROLLPLEX_FULL_AT": str(FULL_AT_STEP * PROMPTS * GROUP_SIZE),
        "ROLLPLEX_FULL_MARK": str(mark),
        "NO_COLOR": "1",
        "COLUMNS": "200",
    }
    command = [sys.executable, "-m", "rollplex_cli.cli.main", "train", "--profile", "tiny", "--plain"]
    done = subprocess.run(
        [*command, "--run-dir", str(folder.root), *sets], capture_output=True, text=True, env=environment, cwd=ROOT,
        timeout=400, check=False,
    )  # fmt: skip
    after_s = time.time() - float(mark.read_text()) if mark.exists() else None
    statuses = [read_status(folder.status(rank)) for rank in range(arguments.ranks)]
    said = done.stderr[-3000:]
    print(said)
    checks = {
        "the memory was taken": after_s is not None,
        "the run failed": done.returncode in (1, 3),
        "within 60 s": after_s is not None and after_s < STOP_LIMIT_S,
        "every rank says so": all(getattr(status, "state", "") == "failed" for status in statuses),
        "the reason is memory": "memory" in said,
        "who holds it is named": "held" in said,
        "no traceback for the user": "Traceback" not in done.stdout + done.stderr,
    }
    for what, holds in checks.items():
        print(f"{'yes' if holds else 'NO':<4}{what}")
    print(f"exit code {done.returncode}, {after_s and round(after_s, 1)} s after the device was full")
    messages = [getattr(status, "message", None) for status in statuses]
    return {
        "exit_code": done.returncode, "after_s": after_s, "checks": checks, "messages": messages,
        "passed": all(checks.values()),
    }  # fmt: skip


def main() -> int:
    """Run the parts."""
    arguments = parse()
    result: dict[str, Any] = {"device": arguments.device, "command": " ".join(["python", *sys.argv])}
    with tempfile.TemporaryDirectory() as work:
        # First: the other part leaves a CUDA context in this process.
        if "full" in arguments.part:
            result["full"] = full(arguments, Path(work))
        if "growth" in arguments.part:
            result["growth"] = growth(arguments, Path(work))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return int(not all(result[part]["passed"] for part in arguments.part))


if __name__ == "__main__":
    sys.exit(main())
