"""Calibration over real engines, with streams that do nothing: prints what was measured and decided.

Run by test_sharing.py as `python calibrate_on_cpu.py RUN_DIR`, with torchrun's variables where there are several ranks.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[2]))

from scenarios.support import open_test_rank

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.engines.inputs import build_prompt_input
from rollplex_cli.profile.sharing import parse_policy
from rollplex_cli.runtime.executor.schedules import schedule_from
from rollplex_cli.runtime.sharing.calibrate import calibrate
from rollplex_cli.runtime.sharing.sharing import Sharing
from rollplex_cli.runtime.step import run_step


class NoStreams:
    """Remembers what was entered."""

    def __init__(self) -> None:
        self.entered: list[int] = []

    def enter(self, reserved_sms: int, *, high_priority: bool = False) -> None:
        self.entered.append(reserved_sms)

    def synchronize(self) -> None:
        """Nothing runs behind."""


def main() -> None:
    """Print one JSON object."""
    own = int(os.environ.get("RANK", "0"))
    with open_test_rank(RunFolder(Path(sys.argv[1])), own) as rank:
        streams: Any = NoStreams()
        rank.sharing = Sharing(parse_policy("auto"), cast("Any", streams), 132)
        inputs = [build_prompt_input(p, rank.media_tokens) for p in rank.loader.batch(0)]
        found = calibrate(rank, inputs)
        calibrated = len(streams.entered)
        row = run_step(rank, 1, inputs, schedule_from("rollplex", early_groups=True, prefixes_in_flight=0)).row
        written = json.loads(rank.run.sharing(own).read_text())
    result = {
        "batches": sorted({m.batch for m in found}),
        "efficiencies": [m.efficiency for m in found],
        "choices": written["choices"],
        "entered": sorted(set(streams.entered[calibrated:])),
        "step": row["step"],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
