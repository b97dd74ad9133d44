"""Where a user's runs are, so that `status`, `logs` and `cancel` find them from any directory by name or job id.

One JSON line per start in `$XDG_STATE_HOME/rollplex/runs.jsonl` (by default below ~/.local/state). It is a
convenience: a run folder's path always works, and a registry that cannot be written is done without.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.files import read_json, read_jsonl
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.launch.slurm.scheduler import script_of_job

JOB_ID = re.compile(r"\d+(_\d+)?\Z")


def registry_path() -> Path:
    """The registry's file."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "rollplex" / "runs.jsonl"


def remember(run: RunFolder, job_id: str | None = None) -> None:
    """Note a start of a run."""
    row = {"time": time.time(), "run": str(run.root.resolve()), "job_id": job_id}
    with contextlib.suppress(OSError, RuntimeError):  # RuntimeError: there is no home folder
        path = registry_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")


def find_runs(run_or_job: str) -> list[RunFolder]:
    """The runs that a path, a run's name or a job id stands for: one, or all of an array; of several, the latest.

    Raises:
        UsageError: there is none.
    """
    for path in (Path(run_or_job), Path("runs") / run_or_job):
        if found := _runs_in(path):
            return found
    rows = [row for row in reversed(_rows()) if _is_run(row.get("run"))]
    for row in rows:
        job_id, path = row.get("job_id") or "", Path(row["run"])
        if run_or_job in (job_id, path.name) and not path.name.isdigit():
            return [RunFolder(path)]
        if run_or_job == job_id:
            return [RunFolder(path)]
        array, underscore, _ = job_id.partition("_")
        if underscore and run_or_job in (array, path.parent.name):
            return _runs_in(path.parent)
    if JOB_ID.match(run_or_job) and (found := _by_script(run_or_job)):
        return found
    hint = f"the latest run is `{rows[0]['run']}`" if rows else "give the path of a run folder"
    if Path(run_or_job).is_dir():
        raise UsageError(f"not a run folder (no `profile.yaml`): `{run_or_job}`", hint=hint)
    raise UsageError(f"no such run or job: `{run_or_job}`", hint=hint)


def _runs_in(path: Path) -> list[RunFolder]:
    """The run whose folder this is, or the runs of the array whose folder this is."""
    if _is_run(str(path)):
        return [RunFolder(path.resolve())]
    job = read_json(RunFolder(path).job) or {}
    folders = [path.resolve() / str(index) for index in range(int(job.get("num_runs", 0)))]
    return [RunFolder(folder) for folder in folders if _is_run(str(folder))]


def _by_script(job_id: str) -> list[RunFolder]:
    """A job that the registry does not know, of another user for example: its script lies in its run folder."""
    script = script_of_job(job_id)
    runs = next((found for folder in script.parents if (found := _runs_in(folder))), []) if script is not None else []
    _, _, index = job_id.partition("_")
    return [run for run in runs if not index or run.root.name == index]


def _rows() -> list[dict[str, str]]:
    try:
        return read_jsonl(registry_path())
    except RuntimeError:
        return []


def _is_run(path: object) -> bool:
    return isinstance(path, str) and RunFolder(Path(path)).profile.is_file()
