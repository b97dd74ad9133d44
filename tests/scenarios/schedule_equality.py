"""Steps under every schedule, with and without injected delays, from the same weights: prints what each gave.

Run by test_schedules.py as `python schedule_equality.py RUN_DIR STEPS`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from scenarios.support import open_test_rank

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.engines.inputs import build_prompt_input
from rollplex_cli.memory.residency import Policy
from rollplex_cli.runtime.executor.schedules import schedule_from
from rollplex_cli.runtime.step import run_step

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from rollplex_cli.core.names import TaskKey
    from rollplex_cli.runtime.assembly.rank import Rank

CASES: dict[str, dict[str, Any]] = {
    "colocate": {"name": "colocate", "early_groups": False, "prefixes_in_flight": 0},
    "rollplex": {"name": "rollplex", "early_groups": False, "prefixes_in_flight": 0},
    "rollplex again": {"name": "rollplex", "early_groups": False, "prefixes_in_flight": 0, "short": True},
    "early groups": {"name": "rollplex", "early_groups": True, "prefixes_in_flight": 0},
    "1 in flight": {"name": "rollplex", "early_groups": True, "prefixes_in_flight": 1},
    "3 in flight": {"name": "rollplex", "early_groups": False, "prefixes_in_flight": 3},
    "colocate, delays 1": {
        "name": "colocate",
        "early_groups": False,
        "prefixes_in_flight": 0,
        "delays": 1,
        "short": True,
    },
    "early groups, delays 2": {"name": "rollplex", "early_groups": True, "prefixes_in_flight": 0, "delays": 2},
    "1 in flight, delays 3": {
        "name": "rollplex",
        "early_groups": True,
        "prefixes_in_flight": 1,
        "delays": 3,
        "short": True,
    },
    "3 in flight, delays 4": {
        "name": "rollplex",
        "early_groups": True,
        "prefixes_in_flight": 3,
        "delays": 4,
        "short": True,
    },
    "all resident": {
        "name": "rollplex",
        "early_groups": True,
        "prefixes_in_flight": 0,
        "residency": "resident",
        "short": True,
    },
}

for _name in ("colocate", "rollplex", "early groups, delays 2"):
    # Passes of several prompts round otherwise, under every schedule alike.
    CASES[f"packed {_name}"] = {**CASES[_name], "pack_tokens": 200, "short": True}

SHORT = 8
"""Steps of a case that is one more of its kind."""


def delays(seed: int) -> Callable[[TaskKey, str], None]:
    """Random sleeps before and after every task, different ones for every task and run."""
    rng = random.Random(seed)

    def wait(_key: TaskKey, _when: str) -> None:
        time.sleep(rng.choice((0.0, 0.0, 0.001, 0.01)))

    return wait


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Hash of all bytes."""
    value = hashlib.sha256()
    for name in sorted(tensors):
        value.update(tensors[name].detach().contiguous().numpy().tobytes())
    return value.hexdigest()


def run_case(
    rank: Rank, case: dict[str, Any], steps: int, initial: dict[str, torch.Tensor]
) -> dict[int, dict[str, Any]]:
    """`steps` steps from the initial weights, or SHORT of them; what they gave after SHORT and after all."""
    rank.trainer_lane.submit(lambda: rank.engines.actor.load_state_dict(initial)).result()
    rank.rollout_lane.submit(rank.engines.rollout.publish).result()
    rank.memory.residency.policy = Policy(case.get("residency", "managed"))
    schedule = schedule_from(
        case["name"], early_groups=case["early_groups"], prefixes_in_flight=case["prefixes_in_flight"]
    )
    packed = dataclasses.replace(rank.profile.schedule, prefix_pack_tokens=case.get("pack_tokens", 0))
    profile = dataclasses.replace(rank.profile, schedule=packed)
    boundary = delays(case["delays"]) if "delays" in case else None
    largest = 0
    losses, norms, logprobs, found = [], [], hashlib.sha256(), {}
    counts = sorted({min(steps, SHORT), min(steps, SHORT) if case.get("short") else steps})
    for step in range(1, counts[-1] + 1):
        rank.control.step = step
        inputs = [build_prompt_input(p, rank.media_tokens) for p in rank.loader.batch(step - 1)]
        result = run_step(rank, step, inputs, schedule, boundary=boundary, profile=profile)
        largest = max(largest, *(len(result.tasks.prefixes.packs.members(group)) for group in result.tasks.inputs))
        losses.append(result.row["loss"].hex())
        norms.append(float(result.row["grad_norm"]).hex())
        for group in sorted(result.tasks.records):
            record = result.tasks.records[group]
            logprobs.update(json.dumps([record.sampled_logprobs, record.trainer_logprobs, record.rewards]).encode())
        if step in counts:
            state = rank.trainer_lane.submit(rank.engines.actor.state_dict).result()
            found[step] = {
                "losses": list(losses),
                "grad_norms": list(norms),
                "logprobs": logprobs.hexdigest(),
                "weights": digest(rank.rollout_lane.submit(rank.engines.rollout.parameters).result()),
                "optimizer": digest(state),
                "distinct_losses": len(set(losses)),
                "diff_max": result.row["logprob_diff_max"],
                "largest_pack": largest,
            }
    return found


def main() -> None:
    """Print one JSON object: case to results."""
    run, steps = RunFolder(Path(sys.argv[1])), int(sys.argv[2])
    with open_test_rank(run) as rank:
        initial = rank.trainer_lane.submit(rank.engines.actor.state_dict).result()
        started = time.monotonic()
        results = {name: run_case(rank, case, steps, initial) for name, case in CASES.items()}
        seconds = time.monotonic() - started
    print(json.dumps({"seconds": seconds, "results": results}), flush=True)


if __name__ == "__main__":
    main()
