"""`rollplex submit`: profile + site -> a job in a cluster's queue."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollplex_cli.cli import options
from rollplex_cli.cli.jobs.check import NUM_SAMPLES, show
from rollplex_cli.cli.output import print_json, print_text, set_json_mode
from rollplex_cli.core.errors import DoesNotFitError, UsageError
from rollplex_cli.core.log import talk

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rollplex_cli.launch.check.findings import Finding
    from rollplex_cli.launch.slurm.submit import Submission
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.profile.site import Site

DEFAULT_SITE = "local"


def _slurm_option(name: str, help_text: str) -> Any:
    return typer.Option(f"--{name}", help=help_text, show_default=False, rich_help_panel="Slurm")


def submit(
    profile: options.ProfileOption = options.DEFAULT_PROFILE,
    set_: options.SetOption = None,
    slurm: Annotated[bool, typer.Option("--slurm", help="Queue the job with Slurm.")] = False,
    site: Annotated[
        str, typer.Option("--site", envvar="ROLLPLEX_SITE", help="A shipped site's name, or a YAML file.")
    ] = DEFAULT_SITE,
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="KEY=V,V", help="A job array, one run per value; several make all pairs."),
    ] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Folder of the run [default: RUNS_DIR/PROFILE-TIME].")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in `--run-dir`.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print script and plan; write and queue nothing.")] = False,
    no_data: Annotated[bool, typer.Option("--no-data", help="Queue it without looking at data and reward.")] = False,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Rows of the data to open first.")] = NUM_SAMPLES,
    nodes: Annotated[int | None, _slurm_option("nodes", "Same as `--set topology.num_nodes=N`.")] = None,
    time: Annotated[str | None, _slurm_option("time", "Time limit of one start.")] = None,
    account: Annotated[str | None, _slurm_option("account", "As in sbatch.")] = None,
    partition: Annotated[str | None, _slurm_option("partition", "As in sbatch.")] = None,
    qos: Annotated[str | None, _slurm_option("qos", "As in sbatch.")] = None,
    constraint: Annotated[str | None, _slurm_option("constraint", "As in sbatch.")] = None,
    exclude: Annotated[str | None, _slurm_option("exclude", "As in sbatch.")] = None,
    reservation: Annotated[str | None, _slurm_option("reservation", "As in sbatch.")] = None,
    gres: Annotated[str | None, _slurm_option("gres", "As in sbatch, instead of GPUs per node.")] = None,
    dependency: Annotated[str | None, _slurm_option("dependency", "As in sbatch.")] = None,
    stop_lead: Annotated[
        int | None, _slurm_option("stop-lead", "Seconds from the stop signal to the time limit.")
    ] = None,
    max_requeues: Annotated[int | None, _slurm_option("max-requeues", "How often it may be queued again.")] = None,
    setup: Annotated[list[str] | None, _slurm_option("setup", "A line of shell before the run. Repeatable.")] = None,
    env: Annotated[
        list[str] | None,
        _slurm_option("env", "NAME=VALUE is written into the script; NAME passes this shell's value. Repeatable."),
    ] = None,
    sbatch: Annotated[list[str] | None, _slurm_option("sbatch", "KEY=VALUE for any other option. Repeatable.")] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Submit a training run to Slurm.

    Checks what `rollplex check` does, copies the program into the run folder, and queues it; later edits change
    nothing. The run stops with a checkpoint when it is preempted or reaches its time limit, and continues.
    """
    set_json_mode(as_json)
    if not slurm:
        raise UsageError("say where to: `--slurm` is the only place so far", hint="`rollplex train` runs it here")
    wishes = {
        "time": time, "account": account, "partition": partition, "qos": qos, "constraint": constraint,
        "exclude": exclude, "reservation": reservation, "gres": gres, "dependency": dependency,
        "stop_lead_s": stop_lead, "max_requeues": max_requeues,
    }  # fmt: skip
    place = _site(site, wishes, setup or [], env or [], sbatch or [])
    overrides = list(set_ or []) + ([f"topology.num_nodes={nodes}"] if nodes is not None else [])
    submission = _plan(_profile_name(profile, run_dir, resume), overrides, grid or [], place, run_dir)
    if dry_run:
        _dry_run(submission, as_json=as_json)
        return
    _validate(submission, samples=samples, data=not no_data, resume=resume)
    from rollplex_cli.launch.slurm.submit import submit as queue

    job_id = queue(submission, sys.argv, resume=resume)
    _tell(submission, job_id, as_json=as_json)


def _site(name: str, wishes: dict[str, Any], setup: list[str], env: list[str], sbatch: list[str]) -> Site:
    """The site with the command line's words over it; checked again as a whole."""
    from rollplex_cli.profile.load import load_site

    quoted = {key: value if isinstance(value, int) else _quoted(value) for key, value in wishes.items()}
    overrides = [f"slurm.{key}={value}" for key, value in quoted.items() if wishes[key] is not None]
    for pair in sbatch:
        key, equals, value = pair.partition("=")
        overrides.append(f"slurm.sbatch.{key.lstrip('-')}={_quoted(value) if equals else 'true'}")
    overrides += [
        f"environment.{name}={_quoted(value)}" for name, equals, value in (v.partition("=") for v in env) if equals
    ]
    place = load_site(name, overrides)
    passed = tuple(v for v in env if "=" not in v)
    return dataclasses.replace(place, setup=(*place.setup, *setup), pass_environment=(*place.pass_environment, *passed))


def _quoted(text: str) -> str:
    """Text as YAML that is read as exactly this text."""
    import json

    return json.dumps(text)


def _profile_name(name: str, run_dir: Path | None, resume: bool) -> str:
    from rollplex_cli.launch.follow.status import GOING_ON, run_status
    from rollplex_cli.launch.run_folder import reopen_run

    if not resume:
        return name
    if run_dir is None:
        raise UsageError("`--resume` needs `--run-dir`")
    run = reopen_run(run_dir)
    state = run_status(run).state
    if state in GOING_ON:
        raise UsageError(f"the run is going on already, it is {state}: `{run_dir}`")
    return str(run.profile)


def _plan(name: str, overrides: list[str], grid: list[str], place: Site, run_dir: Path | None) -> Submission:
    from rollplex_cli.launch.run_folder import default_run_dir
    from rollplex_cli.launch.slurm.submit import grid as points
    from rollplex_cli.launch.slurm.submit import make_submission

    profiles: list[Profile] = []
    for point in points(grid):
        job, plan = options.load_for(name, overrides + point, place)
        profiles.append(job)
        _require(plan_checks(job, plan, place))
    root = run_dir or default_run_dir(Path(place.runs_dir).expanduser(), profiles[0].name)
    return make_submission(root, profiles, place, is_array=bool(grid))


def plan_checks(job: Profile, plan: Any, place: Site) -> list[Finding]:
    """Topology and memory."""
    from rollplex_cli.launch.check.check import quick_checks

    return list(quick_checks(job, plan, place))


def _validate(submission: Submission, *, samples: int, data: bool, resume: bool) -> None:
    from rollplex_cli.launch.check.check import check_job

    run = submission.runs[0] if resume else None
    talk("checking the job before it is queued")
    findings = check_job(
        submission.profiles[0], submission.plans[0], submission.site, num_samples=samples, run=run, data=data
    )
    _require(findings, out_loud=True)


def _require(findings: Iterable[Finding], *, out_loud: bool = False) -> None:
    """Raise the first error with all others below it."""
    from rollplex_cli.core.errors import ClusterError, RollplexError

    errors = []
    for finding in findings:
        if finding.level == "error":
            errors.append(finding)
        elif out_loud and finding.level == "warning":
            show(finding, to_stderr=True)
    if errors:
        kinds: dict[int, type[RollplexError]] = {3: DoesNotFitError, 4: ClusterError}
        lines = [f"\n  {f.name}: {f.text}" + "".join(f"\n    {detail}" for detail in f.details) for f in errors]
        raise kinds.get(errors[0].exit_code, UsageError)("the job would fail" + "".join(lines))


def _dry_run(submission: Submission, *, as_json: bool) -> None:
    text = submission.text()
    plans = [plan.to_dict() for plan in submission.plans]
    if as_json:
        print_json({"run_dir": str(submission.root), "script": text, "plans": plans})
        return
    from rollplex_cli.plan.fit import needs

    print_text(text)
    talk(f"run folder: {submission.root}")
    for plan, run in zip(submission.plans, submission.runs, strict=True):
        where = f" of `{run.root.name}`" if submission.is_array else ""
        talk(f"plan{where}:" + "".join(f"\n  {line}" for line in needs(plan)))


def _tell(submission: Submission, job_id: str, *, as_json: bool) -> None:
    root = submission.root
    log = submission.runs[0].job_log
    if as_json:
        runs = [str(run.root) for run in submission.runs]
        print_json({"job_id": job_id, "run_dir": str(root), "log": str(log), "runs": runs})
        return
    print_text(job_id)
    talk(f"run folder: {root}")
    talk(f"log:        {log}")
    talk(f"state:      rollplex status {job_id}")
    talk(f"follow:     rollplex logs -f {job_id}")
    talk(f"cancel:     rollplex cancel {job_id}")
