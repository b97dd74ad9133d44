"""What a job's data and reward come to: `python -m rollplex_cli.runtime.check DIR data|reward [NUM_SAMPLES]`.

DIR holds `profile.yaml`; the result is written to `DIR/data.json` or `DIR/reward.json`. A fault of the user's is a
result, too: `{"error", "hint"}`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import DataError, RollplexError, UsageError
from rollplex_cli.core.files import write_atomic
from rollplex_cli.core.resources import model_config_folder
from rollplex_cli.data.tasks import load_task
from rollplex_cli.profile.load import load_profile
from rollplex_cli.rl.rewards.scorer import Scorer

if TYPE_CHECKING:
    from rollplex_cli.data.processor import PromptBuilder
    from rollplex_cli.data.tasks import Task
    from rollplex_cli.data.types import Sample
    from rollplex_cli.profile.schema import Profile

NO_LIMIT = 2**40
NUM_LONGEST = 3
OTHER_TEXT = "I do not know."
SPLITS = ("train", "heldout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the data as the model would see it."""

    sample_id: str
    tokens: int = 0
    media_tokens: int = 0
    text: str = ""
    """What is wrong with it; empty if nothing is."""


def main(argv: list[str] | None = None) -> int:
    """Run one check; returns 0 unless nothing could be written."""
    folder, what, *rest = sys.argv[1:] if argv is None else argv
    root = Path(folder)
    profile = load_profile(root / "profile.yaml")
    try:
        values = check_data(profile, root, int(rest[0])) if what == "data" else check_reward(profile, root)
    except RollplexError as error:
        values = {"error": error.message, "hint": error.hint}
    except Exception as error:  # a task's own code may raise anything
        logging.getLogger("rollplex.check").exception("the check ended")
        values = {"error": f"task `{profile.task.name}` raised {type(error).__name__}: {error}", "hint": None}
    write_atomic(root / f"{what}.json", json.dumps(values) + "\n")
    return 0


def check_data(profile: Profile, root: Path, num_samples: int) -> dict[str, Any]:
    """Read all rows, and build prompts of up to `num_samples` of the training rows, spread evenly.

    Raises:
        UsageError: the task or the model's processor cannot be used.
    """
    from rollplex_cli.data.processor import PromptBuilder

    started = time.monotonic()
    task = load_task(profile.task.name)
    task.prepare(root / "data", profile.task.options, profile.runtime.seed)
    rows = {split: task.samples(root / "data", split) for split in SPLITS}
    samples = rows["train"]
    if not samples:
        raise UsageError(f"task `{profile.task.name}` has no rows in its split `train`")
    # Nothing is too long here: the longest are to be counted, not refused one by one.
    builder = PromptBuilder(_processor(profile, task, root), replace(profile.data, max_prompt_tokens=NO_LIMIT))
    chosen = spread(samples, num_samples)
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        built = list(pool.map(lambda sample: look_at(builder, sample), chosen))
    good = sorted((row for row in built if not row.text), key=lambda row: row.tokens, reverse=True)
    ids = [sample.sample_id for sample in samples]
    return {
        "rows": {split: len(found) for split, found in rows.items()},
        "num_checked": len(chosen),
        "seconds": time.monotonic() - started,
        "bad": [{"sample_id": row.sample_id, "text": row.text} for row in built if row.text],
        "duplicates": sorted({name for name in ids if ids.count(name) > 1}) if len(set(ids)) < len(ids) else [],
        "num_over": sum(row.tokens > profile.data.max_prompt_tokens for row in good),
        "mean_tokens": sum(row.tokens for row in good) / max(1, len(good)),
        "longest": [
            {"sample_id": row.sample_id, "tokens": row.tokens, "media_tokens": row.media_tokens}
            for row in good[:NUM_LONGEST]
        ],
    }


def check_reward(profile: Profile, root: Path) -> dict[str, Any]:
    """Score two responses to the first row: its true answer, and other text.

    Raises:
        UsageError: a reward function does not load.
        RewardError: one raises, or returns something that is not a number.
    """
    task = load_task(profile.task.name)
    sample = task.samples(root / "data", "train")[0]
    # Here a failure is what is looked for, even where a run would count it as 0.
    scorer = Scorer(replace(profile.reward, on_error="error"), task.reward, getattr(task, "REWARD_PARTS", {}))
    try:
        true, other = scorer.score(sample, [task.answer_text(sample), OTHER_TEXT], [True, True])
    finally:
        scorer.close()
    return {
        "sample_id": sample.sample_id,
        "true_answer": true.parts,
        "other_text": other.parts,
        "true_total": true.total,
        "other_total": other.total,
    }


def spread(samples: list[Sample], count: int) -> list[Sample]:
    """`count` of the samples at equal distances, or all of them."""
    if count >= len(samples):
        return list(samples)
    return [samples[index * len(samples) // count] for index in range(count)]


def look_at(builder: PromptBuilder, sample: Sample) -> Row:
    """Length of a sample's prompt, or what is wrong with it."""
    try:
        prompt = builder.build(sample)
    except DataError as error:
        text = error.message.removeprefix(f"sample `{sample.sample_id}`: ")
        return Row(sample_id=sample.sample_id, text=text)
    media = sum(medium.patches.shape[0] // 4 for medium in prompt.media)
    return Row(sample_id=sample.sample_id, tokens=len(prompt.token_ids), media_tokens=media)


def _processor(profile: Profile, task: Task, root: Path) -> Path:
    """A folder with the model's tokenizer and processors."""
    if profile.model.init == "checkpoint":
        return Path(profile.model.config).expanduser()
    # The task writes tokenizer and processors beside random weights: of the smallest model, since nobody uses them.
    smallest = model_config_folder("tiny")
    assert smallest is not None, "the tiny configuration comes with the program"
    task.build_base(root / "base", root / "data", smallest / "config.json", profile.runtime.seed)
    return root / "base"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
