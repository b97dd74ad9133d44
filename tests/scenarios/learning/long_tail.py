"""Steps over responses of long-tailed lengths, with and without groups in excess: prints times and rewards.

Run as `python long_tail.py RUN_DIR STEPS`; by test_long_tail.py with few steps, by hand with many for figures. A folder
that is not there is made with responses of up to 768 tokens, so that decode takes most of a step.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scenarios.schedule_equality import digest
from scenarios.support import open_test_rank, prepare_run

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.engines.inputs import build_prompt_input
from rollplex_cli.runtime.executor.schedules import schedule_from
from rollplex_cli.runtime.groups.intake import Intake
from rollplex_cli.runtime.step import run_step

if TYPE_CHECKING:
    import torch

    from rollplex_cli.runtime.assembly.rank import Rank

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "extra groups": {"extra_groups": 4},
    "partial": {"extra_groups": 4, "keep_partial": True},
    "partial, never waited for": {"extra_groups": 4, "keep_partial": True, "max_carries": 32},
    "partial, masked": {"extra_groups": 4, "keep_partial": True, "stale_tokens": "mask"},
    "partial, rollout's vision": {"extra_groups": 4, "keep_partial": True},
}


def lengths_of(number: int, size: int, limit: int) -> list[int]:
    """Response lengths of a group by its place in the line: one group in eight is long."""
    draw = random.Random(number)
    longest = limit if number % 8 == 3 else max(2, limit // 12)
    return [draw.randint(longest // 2, longest) for _ in range(size)]


def run_case(rank: Rank, case: str, schedule: str, steps: int, initial: dict[str, torch.Tensor]) -> dict[str, Any]:
    """`steps` steps from the initial weights."""
    rank.trainer_lane.submit(lambda: rank.engines.actor.load_state_dict(initial)).result()
    rank.rollout_lane.submit(rank.engines.rollout.abort).result()
    rank.rollout_lane.submit(rank.engines.rollout.publish).result()
    rollout = rank.profile.rollout
    intake = Intake(rank.profile, rank.loader, rank.media_tokens)
    order = schedule_from(schedule, early_groups=True, prefixes_in_flight=0)
    rows, numbers, times = [], [], []
    for step in range(1, steps + 1):
        rank.control.step = step
        if rollout.extra_groups:
            started = intake.start()
            inputs, line = [s.input for s in started], [s.number for s in started]
        else:
            share = rank.loader.prompts_per_rank
            line = list(range((step - 1) * share, step * share))
            started, inputs = [], [build_prompt_input(p, rank.media_tokens) for p in rank.loader.batch(step - 1)]
        lengths = {g: lengths_of(n, rollout.group_size, rollout.max_new_tokens) for g, n in enumerate(line)}
        begun = time.monotonic()
        result = run_step(rank, step, inputs, order, lengths=lengths, started=started)
        times.append(time.monotonic() - begun)
        intake.leave(result.tasks.left)
        done = [line[g] for g in sorted(result.tasks.records)]
        numbers += done
        for group, record in result.tasks.records.items():
            assert record.lengths == lengths[group], (record.lengths, lengths[group])
        rows.append({k: result.row[k] for k in ("loss", "reward_mean", "logprob_diff_mean", "stale_token_share")})
    return {
        "rows": rows,
        "numbers": numbers,
        "group_s": sum(times[1:]) / max(1, len(numbers) - rank.loader.prompts_per_rank),
        "step_s": statistics.median(times),
        "weights": digest(rank.rollout_lane.submit(rank.engines.rollout.parameters).result()),
    }


def main() -> None:
    """Print one JSON object: case and schedule to results."""
    run, steps = RunFolder(Path(sys.argv[1])), int(sys.argv[2])
    if not run.profile.exists():
        more = (
            "rollout.max_new_tokens=768", "rollout.kv_tokens=32768", "data.max_prompt_tokens=256",
            "schedule.prefix_activations=recompute",
        )  # fmt: skip
        run = prepare_run(run.root, None, "optimizer.lr=1e-4", *more)
    results: dict[str, dict[str, Any]] = {}
    with open_test_rank(run) as rank:
        base = rank.profile
        initial = rank.trainer_lane.submit(rank.engines.actor.state_dict).result()
        for case, options in CASES.items():
            reuse = dataclasses.replace(base.reuse, vision="vision" in case)
            rollout = dataclasses.replace(base.rollout, **options)
            rank.profile = dataclasses.replace(base, rollout=rollout, reuse=reuse)
            results[case] = {s: run_case(rank, case, s, steps, initial) for s in ("colocate", "rollplex")}
        rank.rollout_lane.submit(rank.engines.rollout.abort).result()
    for case, found in results.items():
        plain, own = results["plain"]["rollplex"], found["rollplex"]
        reward = statistics.fmean(row["reward_mean"] for row in own["rows"])
        print(
            f"{case}: {own['step_s']:.2f} s a step, {plain['step_s'] / own['step_s']:.2f}x; {own['group_s']:.3f} s a "
            f"trained group, {plain['group_s'] / own['group_s']:.2f}x; reward {reward:.3f}",
            file=sys.stderr,
        )
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
