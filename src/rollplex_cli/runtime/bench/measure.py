"""Steps at the profile's limits, to see what they hold: `rollplex profile-memory --measure`.

Every prompt has as many tokens as the profile allows, every response as many as it may have, as the plan assumes.
Nothing is evaluated and no checkpoint is written.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import InterruptedRunError
from rollplex_cli.runtime.bench.prompts import CoinFlips, longest_inputs
from rollplex_cli.runtime.executor.schedules import schedule_of
from rollplex_cli.runtime.step import run_step

if TYPE_CHECKING:
    from rollplex_cli.runtime.assembly.rank import Rank


def run_measure(rank: Rank) -> None:
    """`runtime.max_steps` steps; what they held is in the run's events, phase by phase.

    Only the last one counts: kernels and communication buffers are made at their first use.
    """
    profile = rank.profile
    rank.engines = dataclasses.replace(rank.engines, scorer=CoinFlips(profile.rollout.group_size))
    schedule = schedule_of(profile)
    count = profile.algorithm.prompts_per_step // profile.data_parallel
    lengths = {group: [profile.rollout.max_new_tokens] * profile.rollout.group_size for group in range(count)}
    for step in range(1, profile.runtime.max_steps + 1):
        rank.control.step = step
        result = run_step(rank, step, longest_inputs(rank, step, count), schedule, lengths=lengths)
        if rank.peers.rank == 0:
            with rank.run.metrics.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(result.row) + "\n")
        if rank.stop_agreed(f"measured step {step}"):
            raise InterruptedRunError(f"stopped by a signal after step {step} of a measurement")
