"""Steps with and without work left out, from the same weights: prints what each gave.

Run by test_reuse.py as `python reuse_equality.py RUN_DIR STEPS`; the job has no KL term.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scenarios.schedule_equality import digest
from scenarios.support import open_test_rank

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.engines.inputs import build_prompt_input
from rollplex_cli.profile.schema import ReuseProfile
from rollplex_cli.profile.sharing import parse_policy
from rollplex_cli.rl.rewards.guard import RewardResult
from rollplex_cli.runtime.executor.schedules import schedule_from
from rollplex_cli.runtime.step import run_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rollplex_cli.data.types import Sample
    from rollplex_cli.runtime.assembly.rank import Rank

CASES: dict[str, dict[str, Any]] = {
    "everything": {"schedule": "rollplex", "policy": "priority", "skip": False},
    "zero advantages left out": {"schedule": "rollplex", "policy": "priority", "skip": True},
    "the same, serial": {"schedule": "rollplex", "policy": "serial", "skip": True},
    "the same, colocate": {"schedule": "colocate", "policy": "serial", "skip": True},
    "rollout's prefix": {"schedule": "rollplex", "policy": "priority", "skip": False, "adopt": True},
    "rollout's prefix, colocate": {"schedule": "colocate", "policy": "serial", "skip": False, "adopt": True},
}


class HalfFlat:
    """The job's scorer with one reward for every response to half of the samples."""

    def __init__(self, scorer: Any) -> None:
        self._scorer = scorer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)

    def score(self, sample: Sample, texts: Sequence[str], finished: Sequence[bool]) -> list[RewardResult]:
        if int(sample.sample_id[-1]) % 2:
            return [RewardResult(total=0.5, parts={"noise": 0.5}) for _ in texts]
        return list(self._scorer.score(sample, texts, finished))


def run_case(rank: Rank, case: dict[str, Any], steps: int, initial: dict[str, torch.Tensor]) -> dict[str, Any]:
    rank.trainer_lane.submit(lambda: rank.engines.actor.load_state_dict(initial)).result()
    rank.rollout_lane.submit(rank.engines.rollout.publish).result()
    reuse = ReuseProfile(rollout_prefix=case.get("adopt", False), skip_zero_advantage=case["skip"])
    profile = dataclasses.replace(rank.profile, reuse=reuse)
    rank.sharing.follow(parse_policy(case["policy"]))
    schedule = schedule_from(case["schedule"], early_groups=True, prefixes_in_flight=0)
    rows = []
    for step in range(1, steps + 1):
        rank.control.step = step
        inputs = [build_prompt_input(p, rank.media_tokens) for p in rank.loader.batch(step - 1)]
        rows.append(run_step(rank, step, inputs, schedule, profile=profile).row)
    return {
        "losses": [row["loss"] for row in rows],
        "grad_norms": [row["grad_norm"] for row in rows],
        "skipped": [row["skipped_groups"] for row in rows],
        "diff_mean": [row["logprob_diff_mean"] for row in rows],
        "weights": digest(rank.rollout_lane.submit(rank.engines.rollout.parameters).result()),
    }


def main() -> None:
    """Print one JSON object: case to results."""
    run, steps = RunFolder(Path(sys.argv[1])), int(sys.argv[2])
    with open_test_rank(run) as rank:
        scorer: Any = HalfFlat(rank.engines.scorer)
        rank.engines = dataclasses.replace(rank.engines, scorer=scorer)
        initial = rank.trainer_lane.submit(rank.engines.actor.state_dict).result()
        results = {name: run_case(rank, case, steps, initial) for name, case in CASES.items()}
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
