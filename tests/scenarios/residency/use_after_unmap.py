"""Tasks that do what they must not, in a real step: a lease beyond its lifetime, then a pointer kept beyond unmap.

Run by test_residency.py as `python use_after_unmap.py RUN_DIR`; the second of the two ends the process.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from scenarios.support import open_test_rank

from rollplex_cli.core.errors import LeaseError
from rollplex_cli.core.names import TaskKey, TaskKind
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.engines.inputs import build_prompt_input
from rollplex_cli.runtime.executor.schedules import schedule_from
from rollplex_cli.runtime.step import run_step


def main() -> None:
    """One step whose PUBLISH misbehaves."""
    with open_test_rank(RunFolder(Path(sys.argv[1]))) as rank:
        residency = rank.memory.residency
        kept = rank.engines.actor._arena.flat

        def misbehave(key: TaskKey, when: str) -> None:
            if key.kind is not TaskKind.PUBLISH or when != "before":
                return
            late = TaskKey(TaskKind.ACTOR_SUFFIX, 0)
            try:
                with residency.lease("gradients", late):
                    print("LEASED", flush=True)
            except LeaseError as error:
                print("REFUSED", error, flush=True)
            print("SURVIVED", float(kept.sum()), flush=True)

        rank.control.step = 1
        inputs = [build_prompt_input(p, rank.media_tokens) for p in rank.loader.batch(0)]
        schedule = schedule_from("rollplex", early_groups=True, prefixes_in_flight=0)
        run_step(rank, 1, inputs, schedule, boundary=misbehave)


if __name__ == "__main__":
    main()
