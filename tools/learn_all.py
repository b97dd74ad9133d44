"""Every algorithm on the demo task, from one cold start: prints the reward curves. Takes a few minutes each.

    .venv/bin/python tools/learn_all.py FOLDER [ALGORITHM...]
    .venv/bin/python tools/learn_all.py FOLDER grpo partial oversample \\
        --set runtime.seed=21 --set target=null --set runtime.max_steps=80       reward curves of equal length

A run that has a checkpoint is only read; one that was interrupted before has to be removed first. Exits with 1 if one
of them missed 0.9.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

GOAL = 0.9
WINDOW = 10
# Limits and rates differ where the loss has another scale: AdamW takes out constant factors of the gradient, but not
# those of clipping and KL.
SETTINGS: dict[str, list[str]] = {
    "grpo": [],
    "dr_grpo": ["optimizer.lr=5e-4"],
    "rloo": ["algorithm.kl_coef=0.02"],
    "reinforce_pp": ["algorithm.kl_coef=0.05"],
    "dapo": ["algorithm.kl_coef=0.02", "algorithm.overlong_buffer_tokens=1", "algorithm.overlong_penalty=0.1"],
    "gspo": ["algorithm.kl_coef=0.02"],
    "cispo": ["algorithm.kl_coef=0.05"],
    "ppo": ["algorithm.num_minibatches=2", "algorithm.kl_coef=0.05", "optimizer.lr=3e-4"],
    "partial": ["algorithm.name=grpo", "rollout.extra_groups=8", "rollout.keep_partial=true"],
    "oversample": ["algorithm.name=grpo", "rollout.extra_groups=8"],
}
"""Hyper-parameters of each algorithm on the `tiny` profile; the last two are GRPO with another rollout."""


def train(name: str, folder: Path, base: Path | None, more: list[str]) -> list[float]:
    """Train in `folder` (unless it was) and return the mean reward of each step."""
    metrics = folder / "metrics.jsonl"
    if not (folder / "checkpoints" / "latest").exists():
        sets = [] if "algorithm.name=grpo" in SETTINGS[name] else [f"algorithm.name={name}"]
        sets += SETTINGS[name]
        if base is not None:
            sets += ["model.init=checkpoint", f"model.config={base}"]
        sets += more
        command = [sys.executable, "-m", "rollplex_cli.cli.main", "train", "--profile", "tiny", "--plain"]
        command += ["--run-dir", str(folder), *(part for item in sets for part in ("--set", item))]
        log = folder.with_suffix(".log")
        with log.open("w", encoding="utf-8") as stream:
            # 5 says that the target was missed, which the curve shows too.
            code = subprocess.run(command, stdout=stream, stderr=subprocess.STDOUT, check=False).returncode
        if code not in (0, 5):
            raise SystemExit(f"{name}: exit code {code}, see {log}")
    return [json.loads(line)["reward_mean"] for line in metrics.read_text(encoding="utf-8").splitlines()]


def main() -> int:
    """Train all, print a line each; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("algorithms", nargs="*", metavar="ALGORITHM", help=f"of {', '.join(SETTINGS)} [default: all]")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="KEY=VALUE", help="for every run")
    arguments = parser.parse_args()
    root, names = arguments.folder, arguments.algorithms or list(SETTINGS)
    if unknown := [name for name in names if name not in SETTINGS]:
        parser.error(f"no such algorithm: {', '.join(unknown)}; there are {', '.join(SETTINGS)}")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"cannot make the folder `{root}`: {error.strerror}")
    base: Path | None = None
    missed = []
    for name in names:
        rewards = train(name, root / name, base, arguments.sets)
        base = base or (root / name / "base").resolve()
        means = [sum(rewards[i : i + WINDOW]) / len(rewards[i : i + WINDOW]) for i in range(0, len(rewards), WINDOW)]
        best = max(sum(rewards[i : i + WINDOW]) / WINDOW for i in range(max(1, len(rewards) - WINDOW + 1)))
        if best < GOAL:
            missed.append(name)
        curve = " ".join(f"{mean:.2f}" for mean in means)
        print(f"{name:14} best {WINDOW}-step mean {best:.3f} in {len(rewards)} steps: {curve}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
