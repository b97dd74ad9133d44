"""From a profile and a site to a job in the queue. submitit makes the job; the script's text is our own."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import ClusterError, UsageError
from rollplex_cli.core.files import read_json, write_atomic
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.launch.registry import remember
from rollplex_cli.launch.run_folder import create_run, resume_run
from rollplex_cli.launch.slurm.sbatch import job_script, sbatch_text
from rollplex_cli.launch.snapshot import snapshot
from rollplex_cli.plan.build import build_plan
from rollplex_cli.profile.dump import resolved_yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollplex_cli.plan.build import Plan
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.profile.site import Site

OVERRIDING = re.compile(r"(SBATCH|SLURM)_")
"""Variables that would win over the script's options, or that belong to a job this shell is part of."""
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job to submit: one run, or an array of them."""

    root: Path
    """Absolute: the run folder, or the folder of the array's numbered run folders."""
    profiles: tuple[Profile, ...]
    plans: tuple[Plan, ...]
    site: Site
    is_array: bool

    @property
    def runs(self) -> tuple[RunFolder, ...]:
        """Run folders, in the order of the profiles."""
        if not self.is_array:
            return (RunFolder(self.root),)
        return tuple(RunFolder(self.root / str(index)) for index in range(len(self.profiles)))

    def text(self) -> str:
        """The exact script."""
        job = job_script(
            self.profiles[0],
            self.site,
            run_dir=self.root,
            work_dir=Path.cwd(),
            python=sys.executable,
            code_dir=RunFolder(self.root).code_dir,
            array_size=len(self.profiles) if self.is_array else None,
        )
        return sbatch_text(job)


def grid(arguments: Sequence[str]) -> list[list[str]]:
    """Overrides of each run of an array: `a=1,2` and `b=3,4` give four. No arguments give one run without any.

    Raises:
        UsageError: an argument without values.
    """
    axes = []
    for argument in arguments:
        key, _, values = argument.partition("=")
        if not key or not values:
            raise UsageError(f"`--grid` expects the form `key.path=value,value`: {argument}")
        axes.append([f"{key}={value}" for value in values.split(",")])
    return [list(point) for point in itertools.product(*axes)]


def make_submission(root: Path, profiles: Sequence[Profile], site: Site, *, is_array: bool) -> Submission:
    """Plan a submission; writes nothing.

    Raises:
        UsageError: runs of an array that need different nodes, or a variable of `pass_environment` that is not set.
    """
    places = {(p.topology.num_nodes, p.topology.ranks_per_node, p.topology.device) for p in profiles}
    if len(places) > 1:
        raise UsageError("the runs of an array must need the same nodes: `topology` cannot be part of a `--grid`")
    missing = [name for name in site.pass_environment if name not in os.environ]
    if missing:
        raise UsageError(
            f"not set in this shell, but named in `pass_environment` of site `{site.name}`: {', '.join(missing)}",
            hint=f"`export {missing[0]}=...`, or leave it out of the site",
        )
    return Submission(
        root=Path(os.path.abspath(root)),
        profiles=tuple(profiles),
        plans=tuple(build_plan(profile) for profile in profiles),
        site=site,
        is_array=is_array,
    )


def submit(submission: Submission, argv: Sequence[str], *, resume: bool = False) -> str:
    """Write the run folders with a copy of the program, queue the job, and return its id.

    Raises:
        UsageError: the run folder cannot be used.
        ClusterError: Slurm is not there or refused the job; its own words are in the message.
    """
    submission = _write_runs(submission, argv, resume=resume)
    job_id = _queue(submission)
    for index, run in enumerate(submission.runs):
        own_id = f"{job_id}_{index}" if submission.is_array else job_id
        _note(run, submission, own_id)
        remember(run, own_id)
    if submission.is_array:
        _note(RunFolder(submission.root), submission, job_id)
    return job_id


def _write_runs(submission: Submission, argv: Sequence[str], *, resume: bool) -> Submission:
    root = submission.root
    if submission.is_array and root.is_dir() and any(root.iterdir()):
        raise UsageError(f"the run folder exists: `{root}`", hint="choose another `--run-dir`")
    for profile, plan, run in zip(submission.profiles, submission.plans, submission.runs, strict=True):
        text, planned = resolved_yaml(profile), plan.to_json()
        if resume:
            resume_run(run, profile_yaml=text, plan_json=planned, argv=argv)
            run.cancelled.unlink(missing_ok=True)
        else:
            create_run(run.root, profile_yaml=text, plan_json=planned, argv=argv)
    profiles = snapshot(RunFolder(root), submission.profiles)
    for profile, run in zip(profiles, submission.runs, strict=True):
        write_atomic(run.profile, resolved_yaml(profile))
    RunFolder(root).job_script.write_text(submission.text(), encoding="utf-8")
    return dataclasses.replace(submission, profiles=tuple(profiles))


def _note(run: RunFolder, submission: Submission, job_id: str) -> None:
    before = read_json(run.job) or {}
    job = {
        "job_id": job_id,
        "site": submission.site.name,
        "stop_lead_s": submission.site.slurm.stop_lead_s,
        "max_requeues": submission.site.slurm.max_requeues,
        "time": submission.site.slurm.time,
        "num_runs": len(submission.profiles),
        "earlier_jobs": [*before.get("earlier_jobs", []), *([before["job_id"]] if "job_id" in before else [])],
    }
    write_atomic(run.job, json.dumps(job, indent=2) + "\n")


def _queue(submission: Submission) -> str:
    text = submission.text()
    try:
        with _clean_environment():
            return str(_executor(submission.root, text).submit_script())
    except ClusterError:
        raise
    except Exception as error:  # submitit wraps what a program said in classes of several modules
        said = getattr(error, "stderr", None) or str(error)
        said = said.decode(errors="replace") if isinstance(said, bytes) else said
        raise ClusterError(f"Slurm did not take the job: {' '.join(said.split())}") from error


def _executor(root: Path, text: str) -> Any:
    # Loading submitit takes a quarter of a second, which only a submission has to spend.
    import submitit

    class Executor(submitit.SlurmExecutor):
        """submitit's way to Slurm with another script: its own runs a pickled function per task."""

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            del command, uid
            return text

        def submit_script(self) -> str:
            """Queue the script; returns the job id."""
            return str(self._submit_command("").job_id)

    if Executor.affinity() < 0:
        raise ClusterError("no Slurm here: `srun` is not on PATH", hint="`--dry-run` shows what would be submitted")
    folder = root / "submitit"
    folder.mkdir(exist_ok=True)
    return Executor(folder)


@contextmanager
def _clean_environment() -> Iterator[None]:
    """Hide variables that change what `sbatch` does; the job would inherit them, too."""
    hidden = {name: value for name, value in os.environ.items() if OVERRIDING.match(name) and name not in KEPT}
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)
