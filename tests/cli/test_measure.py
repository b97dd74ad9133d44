"""The job behind `profile-memory --measure`."""

from __future__ import annotations

from rollplex_cli.cli.measure import NUM_STEPS, measured_job
from rollplex_cli.profile.load import load_profile


def test_the_measured_job_has_the_profiles_sizes_and_nothing_that_stops_it() -> None:
    job = load_profile("tiny", [])
    measured = measured_job(job)
    assert (measured.model.init, measured.target, measured.runtime.max_steps) == ("random", None, NUM_STEPS)
    assert (measured.rollout, measured.data, measured.memory) == (job.rollout, job.data, job.memory)
