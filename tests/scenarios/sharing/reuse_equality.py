"""Steps with and without work left out, from the same weights: prints what each gave.

Run by test_reuse.py as `python reuse_equality.py RUN_DIR STEPS`. A job with a frozen vision tower has a KL term, one
that trains it has none.
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
from rollplex_cli.engines.trainer.model import vision
from rollplex_cli.profile.sections.reuse import ReuseProfile
from rollplex_cli.profile.sharing import parse_policy
from rollplex_cli.rl.rewards.guard import RewardResult
from rollplex_cli.runtime.executor.schedules import schedule_from
from rollplex_cli.runtime.step import run_step

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from rollplex_cli.data.types import Sample
    from rollplex_cli.runtime.assembly.rank import Rank

BESIDE, SERIAL, COLOCATE = ("rollplex", "priority"), ("rollplex", "serial"), ("colocate", "serial")
Case = tuple[tuple[str, str], dict[str, bool]]
"""Schedule and policy, and what is reused beyond `NOTHING`."""
PACK_TOKENS = 300
"""Of a pass in a case whose name begins with `packed`."""
NOTHING = dict.fromkeys(("rollout_prefix", "vision", "frozen_vision", "skip_zero_advantage"), False)
TRAINED: dict[str, Case] = {
    "everything": (BESIDE, {}),
    "zero advantages left out": (BESIDE, {"skip_zero_advantage": True}),
    "the same, serial": (SERIAL, {"skip_zero_advantage": True}),
    "the same, colocate": (COLOCATE, {"skip_zero_advantage": True}),
    "rollout's prefix": (BESIDE, {"rollout_prefix": True}),
    "rollout's prefix, colocate": (COLOCATE, {"rollout_prefix": True}),
    "rollout's vision": (BESIDE, {"vision": True}),
    "rollout's vision, serial": (SERIAL, {"vision": True}),
    "rollout's vision, colocate": (COLOCATE, {"vision": True}),
}
FROZEN: dict[str, Case] = {
    "everything": (BESIDE, {}),
    "one run for both": (BESIDE, {"frozen_vision": True}),
    "one run for both, colocate": (COLOCATE, {"frozen_vision": True}),
    "rollout's vision": (BESIDE, {"vision": True, "frozen_vision": True}),
    "rollout's vision, serial": (SERIAL, {"vision": True}),
    "rollout's vision, colocate": (COLOCATE, {"vision": True}),
    "rollout's vision and prefix": (BESIDE, {"vision": True, "rollout_prefix": True}),
    "packed, everything": (BESIDE, {}),
    "packed, one run for both": (BESIDE, {"frozen_vision": True}),
    "packed, one run for both, colocate": (COLOCATE, {"frozen_vision": True}),
    "packed, one run and the rollout's prefix": (BESIDE, {"frozen_vision": True, "rollout_prefix": True}),
    "packed, rollout's vision": (BESIDE, {"vision": True}),
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


class Towers:
    """Patches that the vision towers have seen: the rollout's, and the trainer's for all its roles."""

    def __init__(self, rank: Rank) -> None:
        self.rollout = self.trainer = 0
        engine: Any = rank.engines.rollout
        engine._scheduler.model.visual.register_forward_pre_hook(self._of_rollout)
        self._real, vision.patch_embed = vision.patch_embed, self._of_trainer

    def _of_rollout(self, _module: Any, args: Any) -> None:
        self.rollout += len(args[0])

    def _of_trainer(self, weights: Any, patches: torch.Tensor, layout: Any) -> torch.Tensor:
        self.trainer += len(patches)
        return self._real(weights, patches, layout)

    def take(self) -> dict[str, int]:
        """Since the last call."""
        seen = {"rollout": self.rollout, "trainer": self.trainer}
        self.rollout = self.trainer = 0
        return seen


def run_case(
    rank: Rank, towers: Towers, case: Case, steps: int, initial: dict[str, torch.Tensor], pack_tokens: int
) -> dict[str, Any]:
    """`steps` steps from the initial weights."""
    rank.trainer_lane.submit(lambda: rank.engines.actor.load_state_dict(initial)).result()
    rank.rollout_lane.submit(rank.engines.rollout.publish).result()
    (name, policy), reused = case
    profile = dataclasses.replace(
        rank.profile,
        reuse=ReuseProfile(**{**NOTHING, **reused}),
        schedule=dataclasses.replace(rank.profile.schedule, prefix_pack_tokens=pack_tokens),
    )
    rank.sharing.follow(parse_policy(policy))
    schedule = schedule_from(name, early_groups=True, prefixes_in_flight=0)
    rows, patches = [], 0
    towers.take()
    for step in range(1, steps + 1):
        rank.control.step = step
        inputs = [build_prompt_input(p, rank.media_tokens) for p in rank.loader.batch(step - 1)]
        patches += sum(len(m.patches) for i in inputs for m in i.prompt.media)
        rows.append(run_step(rank, step, inputs, schedule, profile=profile).row)
    return {
        "losses": [row["loss"] for row in rows],
        "grad_norms": [row["grad_norm"] for row in rows],
        "skipped": [row["skipped_groups"] for row in rows],
        "diff_mean": [row["logprob_diff_mean"] for row in rows],
        "kl": [row["kl"] for row in rows],
        "weights": digest(rank.rollout_lane.submit(rank.engines.rollout.parameters).result()),
        "runs": {role: seen / patches for role, seen in towers.take().items()},
    }


def main() -> None:
    """Print one JSON object: case to results."""
    run, steps = RunFolder(Path(sys.argv[1])), int(sys.argv[2])
    with open_test_rank(run) as rank:
        scorer: Any = HalfFlat(rank.engines.scorer)
        rank.engines = dataclasses.replace(rank.engines, scorer=scorer)
        initial = rank.trainer_lane.submit(rank.engines.actor.state_dict).result()
        towers = Towers(rank)
        cases = FROZEN if rank.profile.frozen_vision else TRAINED
        results = {
            name: run_case(rank, towers, case, steps, initial, PACK_TOKENS if name.startswith("packed") else 0)
            for name, case in cases.items()
        }
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
