"""Two steps of a bundled tiny model of each newer family, and its export: prints what each gave.

Run by test_families.py as `python train_and_export.py PREPARED_DIR FOLDER`.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scenarios.schedule_equality import digest
from scenarios.support import open_test_rank, small

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.profile.dump import resolved_yaml
from rollplex_cli.profile.load import load_profile
from rollplex_cli.runtime.export import MASTER, export
from rollplex_cli.runtime.loop import Run
from rollplex_cli.runtime.prepare import prepare

SHORT_COLD_START = (
    "model.init=cold_start", "cold_start.max_steps=3", "cold_start.test_from_step=2", "cold_start.test_every=2",
    "cold_start.test_clips=2", "cold_start.warmup_steps=1",
)  # fmt: skip
FAMILIES: dict[str, tuple[str, ...]] = {"tiny-qwen2vl": (), "tiny-qwen3vl": SHORT_COLD_START}


def run_family(prepared: RunFolder, folder: Path, name: str) -> dict[str, Any]:
    """Train, export, and read what was exported as anybody else would."""
    run = RunFolder(folder / name)
    run.make()
    overrides = small(f"model.config={name}", *FAMILIES[name], "runtime.max_steps=2", "evaluation.num_samples=2")
    run.profile.write_text(resolved_yaml(load_profile("tiny", overrides)), encoding="utf-8")
    shutil.copytree(prepared.data_dir, run.data_dir, dirs_exist_ok=True)
    prepare(run)
    with open_test_rank(run) as rank:
        before = digest(rank.rollout_lane.submit(rank.engines.rollout.parameters).result())
        work = Run(rank)
        work.run()
        state = rank.trainer_lane.submit(rank.engines.actor.state_dict).result()
        masters = {key.removeprefix(MASTER): value.clone() for key, value in state.items() if key.startswith(MASTER)}
        after = digest(rank.rollout_lane.submit(rank.engines.rollout.parameters).result())
    export(run, folder / f"{name}-exported")
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model = AutoModelForImageTextToText.from_pretrained(folder / f"{name}-exported", dtype="float32")
    exported = dict(model.named_parameters())
    rows = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    return {
        "steps": [row["step"] for row in rows],
        "diff_max": max(row["logprob_diff_max"] for row in rows),
        "grad_norms": [row["grad_norm"] for row in rows],
        "changed": before != after,
        "model_class": type(model).__name__,
        "processor_class": type(AutoProcessor.from_pretrained(folder / f"{name}-exported")).__name__,
        "names_differ": sorted(masters.keys() ^ exported.keys()),
        "weights_differ": [key for key, value in masters.items() if key in exported and not exported[key].equal(value)],
        "num_weights": len(masters),
    }


def main() -> None:
    """Print one JSON object: configuration to results."""
    prepared, folder = RunFolder(Path(sys.argv[1])), Path(sys.argv[2])
    print(json.dumps({name: run_family(prepared, folder, name) for name in FAMILIES}), flush=True)


if __name__ == "__main__":
    main()
