"""What ranks held, read back from their events."""

from __future__ import annotations

from pathlib import Path

from rollplex_cli.core.events import EventWriter
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.report.memory.measured import measured_phases


def write(run: RunFolder, rank: int, step: int, phase: str, peak: int, **objects: int) -> None:
    events = EventWriter(run.events(rank), rank)
    events.point(
        "memory", step=step, phase=phase, lane="memory", objects=objects, boundaries={"actor_boundary": 3},
        peak_bytes=peak, driver_peak_bytes=peak + 2,
    )  # fmt: skip
    events.point("residency", step=step, phase=phase, lane="memory", mapped=True, regions=["rollout_kv"])
    events.close()


def test_the_last_whole_step_of_the_rank_that_held_most(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    for rank, kv in ((0, 7), (1, 9)):
        for step in (1, 2):
            write(run, rank, step, "GENERATE", 10 * step + rank, rollout_kv=kv, pytorch=5, context_and_graphs=2)
            write(run, rank, step, "PUBLISH", 4, snapshot=4)
        write(run, rank, 3, "GENERATE", 99, rollout_kv=99)  # the step broke off
    phases = measured_phases(run)
    assert phases["GENERATE"] == {
        "peak_bytes": 21,
        "driver_peak_bytes": 23,
        "objects": {"rollout_kv": 9, "activations_and_caches": 2, "context_and_graphs": 2, "actor_boundary": 3},
    }
    assert measured_phases(run, 1)["GENERATE"]["peak_bytes"] == 11
    assert measured_phases(RunFolder(tmp_path / "none")) == {}
