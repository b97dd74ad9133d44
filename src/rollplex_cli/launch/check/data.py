"""Checks that need the task and the processor: they run in processes of their own, since they load torch.

Each has a time limit: a reward function that never returns is a finding, not a check that never ends.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import DataError
from rollplex_cli.core.files import read_json, read_tail
from rollplex_cli.launch.check.findings import Finding, error, ok, warning
from rollplex_cli.launch.subprocess import Child
from rollplex_cli.launch.torchrun import worker_env
from rollplex_cli.profile.dump import resolved_yaml

if TYPE_CHECKING:
    from rollplex_cli.profile.schema import Profile

CHECK = "rollplex_cli.runtime.check"
DATA_LIMIT_S = 600.0
REWARD_LIMIT_S = 60.0
MAX_SHOWN = 5


def check_data(profile: Profile, num_samples: int, *, reward_limit_s: float = REWARD_LIMIT_S) -> list[Finding]:
    """Read rows, open media, count tokens, call the reward."""
    folder = Path(tempfile.mkdtemp(prefix="rollplex-check-"))
    try:
        (folder / "profile.yaml").write_text(resolved_yaml(profile), encoding="utf-8")
        env = worker_env(profile, os.environ)
        data = _run(folder, "data", str(num_samples), env=env, limit_s=DATA_LIMIT_S)
        if isinstance(data, Finding):
            return [data]
        reward = _run(folder, "reward", env=env, limit_s=reward_limit_s)
        return [
            _rows(data, profile),
            *_prompts(data, profile),
            reward if isinstance(reward, Finding) else _reward(reward),
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def longest_prompt(profile: Profile, num_samples: int) -> dict[str, Any]:
    """The longest of up to `num_samples` prompts of the training rows: `sample_id`, `tokens`, `media_tokens`,
    `num_checked`.

    Raises:
        DataError: the data cannot be read, or no prompt could be built.
    """
    folder = Path(tempfile.mkdtemp(prefix="rollplex-check-"))
    try:
        (folder / "profile.yaml").write_text(resolved_yaml(profile), encoding="utf-8")
        data = _run(folder, "data", str(num_samples), env=worker_env(profile, os.environ), limit_s=DATA_LIMIT_S)
        if isinstance(data, Finding):
            raise DataError(f"cannot read the data of task `{profile.task.name}`: {data.text}", hint=_joined(data))
        if not data["longest"]:
            first = data["bad"][0]["text"] if data["bad"] else "there are no rows"
            count, task = data["num_checked"], profile.task.name
            raise DataError(f"none of {count} prompts of task `{task}` can be built: {first}")
        return {**data["longest"][0], "num_checked": data["num_checked"]}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _joined(finding: Finding) -> str | None:
    return "; ".join(finding.details) or None


def _run(folder: Path, what: str, *arguments: str, env: dict[str, str], limit_s: float) -> dict[str, Any] | Finding:
    log, result = folder / f"{what}.log", folder / f"{what}.json"
    child = Child([sys.executable, "-m", CHECK, str(folder), what, *arguments], log=log, env=env)
    try:
        code = child.wait(limit_s)
    finally:
        child.kill_tree()
    if code is None:
        name = "the reward function" if what == "reward" else "the check of the data"
        return error(what, f"{name} did not return within {limit_s:g} s", *read_tail(log, 3))
    values = read_json(result)
    if values is None:
        return error(what, f"the check ended with exit code {code}", *read_tail(log, 3))
    if "error" in values:
        hint = [values["hint"]] if values.get("hint") else []
        return error(what, values["error"], *hint)
    return values


def _rows(data: dict[str, Any], profile: Profile) -> Finding:
    bad = data["bad"]
    counts = ", ".join(f"{number} {split}" for split, number in data["rows"].items())
    looked = f"{counts} rows; {data['num_checked']} of them opened in {data['seconds']:.1f} s"
    if bad:
        shown = [f"{row['sample_id']}: {row['text']}" for row in bad[:MAX_SHOWN]]
        more = [f"and {len(bad) - MAX_SHOWN} more"] if len(bad) > MAX_SHOWN else []
        text = f"{len(bad)} of {data['num_checked']} rows cannot be used ({looked})"
        # Only media may be bad and passed over; a run with this share of bad rows goes on.
        say = warning if profile.data.on_bad_media == "skip" and len(bad) < data["num_checked"] else error
        return say("data", text, *shown, *more)
    if data["duplicates"]:
        shown = [str(name) for name in data["duplicates"][:MAX_SHOWN]]
        return warning("data", f"{looked}; {len(data['duplicates'])} sample ids occur twice", *shown)
    return ok("data", looked)


def _prompts(data: dict[str, Any], profile: Profile) -> list[Finding]:
    limit, lengths = profile.data.max_prompt_tokens, data["longest"]
    if not lengths:
        return []
    shown = [f"{row['sample_id']}: {row['tokens']} tokens, {row['media_tokens']} of them media" for row in lengths]
    over = data["num_over"]
    if over:
        text = f"{over} of {data['num_checked']} prompts are longer than `data.max_prompt_tokens` allows: {limit}"
        skips = profile.data.on_long_prompt == "skip" and over < data["num_checked"]
        return [warning("prompts", f"{text}; they are left out", *shown) if skips else error("prompts", text, *shown)]
    return [ok("prompts", f"{data['mean_tokens']:.0f} tokens on average, limit {limit}; the longest are", *shown)]


def _reward(values: dict[str, Any]) -> Finding:
    true = json.dumps(values["true_answer"])
    text = f"the true answer of `{values['sample_id']}` earns {true}, other text {json.dumps(values['other_text'])}"
    if values["true_total"] <= values["other_total"]:
        return warning("reward", f"{text}: the true answer should earn more")
    return ok("reward", text)
