"""Runs in which every other sample earns equal rewards, with replacement of such groups: prints what each gave.

Run by test_dynamic_sampling.py as `python dynamic_sampling.py PREPARED_DIR FOLDER`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scenarios.schedule_equality import digest
from scenarios.support import open_test_rank, prepare_run

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.runtime.loop import Run

STEPS = 4
DAPO = ("algorithm.name=dapo", "algorithm.max_refills=2", "optimizer.lr=1e-3")
CASES: dict[str, tuple[str, ...]] = {
    "plain": ("data.num_workers=2", "data.prefetch_steps=1"),
    "colocate, resumed": ("schedule.name=colocate",),
    "in excess": ("rollout.extra_groups=2",),
    "in excess, colocate": ("rollout.extra_groups=2", "schedule.name=colocate"),
}
KEPT = (
    "step", "loss", "grad_norm", "reward_mean", "reward_std", "entropy", "logprob_diff_mean", "num_groups",
    "refilled_groups", "kept_groups", "skipped_groups",
)  # fmt: skip


def go_on(run: RunFolder) -> tuple[str, list[str]]:
    """Run to `runtime.max_steps` from the newest checkpoint.

    Returns a hash of the weights, and the beginning of the line of samples, longer than what was taken of it.
    """
    with open_test_rank(run) as rank:
        work = Run(rank)
        work.resume()
        work.run()
        line = [prompt.sample.sample_id for prompt in rank.loader.take(0, STEPS * 4 * 3)]
        return digest(rank.rollout_lane.submit(rank.engines.rollout.parameters).result()), line


def run_case(prepared: RunFolder, root: Path, case: str) -> dict[str, Any]:
    """One run, or two that follow each other."""
    run = prepare_run(root, prepared, *DAPO, *CASES[case], f"runtime.max_steps={STEPS}")
    if "resumed" in case:
        text = run.profile.read_text()
        run.profile.write_text(text.replace(f"max_steps: {STEPS}", f"max_steps: {STEPS // 2}"))
        go_on(run)
        run.profile.write_text(text)
    weights, line = go_on(run)
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    responses = [json.loads(line) for line in (run.rollouts_dir / "rank0.jsonl").read_text().splitlines()]
    return {
        "rows": [{key: row[key] for key in KEPT} for row in rows],
        "samples": [[row["step"], row["sample_id"], row["reward"]] for row in responses],
        "weights": weights,
        "line": line,
    }


def main() -> None:
    """Print one JSON object: case to results."""
    os.environ["ROLLPLEX_TEST_REWARD"] = "some equal"
    prepared, folder = RunFolder(Path(sys.argv[1])), Path(sys.argv[2])
    print(json.dumps({case: run_case(prepared, folder / case, case) for case in CASES}), flush=True)


if __name__ == "__main__":
    main()
