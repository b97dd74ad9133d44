"""A few steps of every algorithm over real engines, under both schedules: prints what each gave.

Run by test_algorithms.py as `python algorithms.py RUN_DIR STEPS`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scenarios.schedule_equality import digest
from scenarios.support import open_test_rank

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.engines.inputs import build_prompt_input
from rollplex_cli.profile.dump import resolved_yaml
from rollplex_cli.profile.load import parse_profile
from rollplex_cli.runtime.executor.schedules import schedule_from
from rollplex_cli.runtime.step import run_step

if TYPE_CHECKING:
    import torch

    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.runtime.assembly.rank import Rank

CASES: dict[str, list[str]] = {
    "grpo": [],
    "dr_grpo": [],
    "rloo": [],
    "reinforce_pp": [],
    "dapo": [],
    "gspo": [],
    "cispo": ["algorithm.importance_cap=2.0"],
    "ppo": ["algorithm.num_minibatches=2", "algorithm.num_epochs=2"],
    "grpo, entropy": ["algorithm.entropy_coef=0.01"],
    "ppo, old from rollout": ["algorithm.num_minibatches=4", "algorithm.old_logprobs=rollout"],
}
"""Name of the algorithm (up to a comma) and further settings."""


def profile_of(base: Profile, case: str) -> Profile:
    """The run's profile with another algorithm; presets apply as if its file had named it."""
    algorithm = {f.name: getattr(base.algorithm, f.name) for f in dataclasses.fields(base.algorithm)}
    lines = resolved_yaml(base).splitlines()
    start = lines.index("algorithm:")
    end = next(i for i in range(start + 1, len(lines)) if lines[i] and not lines[i].startswith(" "))
    text = "\n".join([*lines[: start + 1], f"  name: {case.partition(',')[0]}", *lines[end:]])
    early = [] if case != "reinforce_pp" else ["schedule.early_groups=false"]
    keep = [f"algorithm.{name}={algorithm[name]}" for name in ("prompts_per_step", "kl_coef")]
    return parse_profile(text, case, [*keep, *early, *CASES[case]])


def run_case(rank: Rank, schedule_name: str, steps: int, initial: dict[str, torch.Tensor]) -> dict[str, Any]:
    """`steps` steps from the initial weights."""
    rank.trainer_lane.submit(lambda: rank.engines.actor.load_state_dict(initial)).result()
    rank.rollout_lane.submit(rank.engines.rollout.publish).result()
    algorithm = rank.profile.algorithm
    schedule = schedule_from(
        schedule_name, early_groups=rank.profile.schedule.early_groups, prefixes_in_flight=0,
        advantages_wait=algorithm.advantage == "batch_std",
    )  # fmt: skip
    rows, updates, old_kept, moved = [], 0, True, 0.0
    for step in range(1, steps + 1):
        rank.control.step = step
        before = rank.engines.actor.updates
        inputs = [build_prompt_input(p, rank.media_tokens) for p in rank.loader.batch(step - 1)]
        result = run_step(rank, step, inputs, schedule)
        updates = rank.engines.actor.updates - before
        rows.append(
            {k: result.row[k] for k in ("loss", "grad_norm", "kl", "entropy", "skipped_groups", "clip_fraction")}
        )
        for group, batch in result.tasks.learner.batches.items():
            record = result.tasks.records[group]
            expected = record.sampled_logprobs if algorithm.old_logprobs == "rollout" else record.trainer_logprobs
            old_kept = old_kept and batch.old is not None and batch.old.tolist() == expected
        moved = max(moved, result.row["logprob_diff_max"])
    weights = digest(rank.rollout_lane.submit(rank.engines.rollout.parameters).result())
    return {"rows": rows, "updates": updates, "old_kept": old_kept, "diff_max": moved, "weights": weights}


def main() -> None:
    """Print one JSON object: case and schedule to results."""
    run, steps = RunFolder(Path(sys.argv[1])), int(sys.argv[2])
    results: dict[str, dict[str, Any]] = {}
    with open_test_rank(run) as rank:
        base = rank.profile
        initial = rank.trainer_lane.submit(rank.engines.actor.state_dict).result()
        started = time.monotonic()
        for case in CASES:
            rank.profile = profile_of(base, case)
            results[case] = {name: run_case(rank, name, steps, initial) for name in ("colocate", "rollplex")}
        seconds = time.monotonic() - started
    print(json.dumps({"seconds": seconds, "results": results}), flush=True)


if __name__ == "__main__":
    main()
