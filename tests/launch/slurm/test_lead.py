from __future__ import annotations

import json
from pathlib import Path

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.launch.slurm.lead import Measured, lead_warning, measure


def test_too_short_a_lead_is_told_with_the_numbers() -> None:
    assert lead_warning(Measured(step_s=95.2, save_s=12.0), 60) == (
        "the stop signal comes 60 s before the time limit, a step takes up to 95.2 s and a checkpoint up to 12.0 s: "
        "set `slurm.stop_lead_s` to at least 113"
    )
    assert lead_warning(Measured(step_s=95.2, save_s=12.0), 113) is None
    text = lead_warning(Measured(step_s=95.2, save_s=None), 60)
    assert text is not None
    assert "no checkpoint was written yet" in text
    assert lead_warning(None, 1) is None


def test_steps_and_checkpoints_are_read_from_the_run(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.make()
    run.metrics.write_text('{"step": 1, "step_s": 90}\n')
    assert measure(run) is None
    run.metrics.write_text("".join(json.dumps({"step": n, "step_s": s}) + "\n" for n, s in ((1, 90), (2, 3.5), (3, 2))))
    assert measure(run) == Measured(step_s=3.5, save_s=None)  # the first step warms up
    spans = [{"name": "checkpoint", "t0": 5.0, "t1": 6.5}, {"name": "decode", "t0": 1.0, "t1": 9.0}]
    run.events(0).write_text("".join(json.dumps(span) + "\n" for span in spans))
    measured = measure(run)
    assert measured is not None
    assert (measured.save_s, measured.needed_s) == (1.5, 10.0)
