"""The layout of eight GPUs on eight CPU processes: train TP 8 over two rollout replicas of TP 4, against one rank.

    python tools/eight_ranks.py --steps 3 --out jobs/bench/results/cpu-8-ranks.json

A tiny model with eight attention heads, decode and training launched in one order. Takes minutes on two cores and about
12 GB of memory. Exits 1 if any figure of a step differs by more than float32 explains.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "src" / "rollplex_cli" / "plan" / "configs" / "tiny" / "config.json"
LIMITS = {"reward_mean": 1e-9, "loss": 1e-4, "kl": 1e-4, "grad_norm": 1e-3, "response_tokens_mean": 0.0}
"""Largest difference from one rank: of `grad_norm` relative, of the others absolute."""
JOB = (
    # Rewards that vary without a model that has learned anything.
    "task.name=tests/scenarios/noise_task", "model.init=random", "target=null", "evaluation.num_samples=0",
    "data.num_workers=0", "optimizer.warmup_steps=0",
    "task.options.num_train_clips=12", "task.options.num_validation_clips=4", "task.options.num_eval_clips=4",
    "algorithm.prompts_per_step=4", "rollout.group_size=4", "optimizer.clip_norm=100.0", "guards.check_publish=true",
    "guards.zero_reward_steps=1000", "runtime.checkpoint_every=0",
)  # fmt: skip
LAYOUTS = {
    "one rank": (),
    "train TP 8, rollout TP 4": (
        "topology.ranks_per_node=8", "topology.train_tp=8", "topology.rollout_tp=4", "schedule.launch_order=always",
    ),
}  # fmt: skip


def eight_heads() -> dict[str, Any]:
    """The tiny model with eight query heads, four key/value heads and eight heads in the vision tower."""
    config: dict[str, Any] = json.loads(TINY.read_text(encoding="utf-8"))
    config["text_config"] |= {"num_attention_heads": 8, "num_key_value_heads": 4}
    config["text_config"]["rope_parameters"]["mrope_section"] = [2, 3, 3]
    config["vision_config"] |= {"hidden_size": 128, "num_heads": 8}
    return config


def train(folder: Path, name: str, overrides: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Rows of the metrics of one run, and how long it took."""
    run_dir, begun = folder / name.replace(" ", "-").replace(",", ""), time.monotonic()
    sets = [*JOB, f"model.config={folder / 'model'}", f"runtime.max_steps={steps}", *overrides]
    argv = ["train", "--profile", "tiny", "--plain", "--run-dir", str(run_dir)]
    argv += [word for value in sets for word in ("--set", value)]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    program = [sys.executable, "-m", "rollplex_cli.cli.main", *argv]
    subprocess.run(program, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": path})
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {"overrides": list(overrides), "seconds": round(time.monotonic() - begun, 1), "rows": rows}


def differences(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, float]:
    """Largest difference of every figure over the steps."""
    found = {}
    for name in LIMITS:
        pairs = [(row[name], twin[name]) for row, twin in zip(one, other, strict=True)]
        scale = [abs(a) if name == "grad_norm" else 1.0 for a, _ in pairs]
        found[name] = max(abs(a - b) / s for (a, b), s in zip(pairs, scale, strict=True))
    return found


def main() -> int:
    """Run both layouts and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(eight_heads()), encoding="utf-8")
        runs = {layout: train(folder, layout, sets, arguments.steps) for layout, sets in LAYOUTS.items()}
    one, eight = (run["rows"] for run in runs.values())
    found = differences(one, eight)
    result = {
        "differences": found,
        "limits": LIMITS,
        "hardware": f"{os.cpu_count()} CPU cores, {platform.machine()}",
        "commit": subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip(),
        "command": f"python tools/eight_ranks.py --steps {arguments.steps}",
        "job": list(JOB),
        "runs": runs,
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    return int(any(found[figure] > limit for figure, limit in LIMITS.items()))


if __name__ == "__main__":
    sys.exit(main())
