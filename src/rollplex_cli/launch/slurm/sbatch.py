"""The text of a job script. Pure: equal arguments give equal text, and nothing is looked up.

One task per node runs `rollplex_cli.launch.slurm.node`, which starts torchrun there. When all of them have ended,
`rollplex_cli.launch.slurm.finish` decides whether the job is queued again.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rollplex_cli.core.paths import RunFolder

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.profile.site import Site

NODE = "rollplex_cli.launch.slurm.node"
FINISH = "rollplex_cli.launch.slurm.finish"
PLAIN = re.compile(r"[A-Za-z0-9_./+@:,=-]+\Z")
"""Paths that Slurm reads from a script as they are: no quotes, no blanks, none of its own `%` patterns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobScript:
    """Everything a script is made of."""

    run_dir: Path
    """Absolute. Of an array: the folder of the runs' folders, which are numbered from 0."""
    work_dir: Path
    """Where the run's relative paths start."""
    flags: Mapping[str, str | int | bool]
    """Options of `sbatch` by long name."""
    python: str
    code_dir: Path
    """Folder that holds the program's package."""
    array_size: int | None = None
    max_requeues: int = 0
    setup: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    srun: tuple[str, ...] = ()
    wrapper: tuple[str, ...] = ()


def job_script(
    profile: Profile, site: Site, *, run_dir: Path, work_dir: Path, python: str, code_dir: Path, array_size: int | None
) -> JobScript:
    """What a profile and a site come to."""
    return JobScript(
        run_dir=run_dir,
        work_dir=work_dir,
        flags=job_flags(profile, site, array_size),
        python=site.python or python,
        code_dir=code_dir,
        array_size=array_size,
        max_requeues=site.slurm.max_requeues,
        setup=site.setup,
        environment=site.environment,
        srun=site.srun,
        wrapper=site.wrapper,
    )


def job_flags(profile: Profile, site: Site, array_size: int | None) -> dict[str, str | int | bool]:
    """Options of `sbatch` by long name; those of `slurm.sbatch` win over what follows from other keys."""
    slurm, topology = site.slurm, profile.topology
    flags: dict[str, str | int | bool | None] = {
        "job-name": job_name(profile.name),
        "nodes": topology.num_nodes,
        "ntasks-per-node": 1,
        "cpus-per-task": site.node.cpus,
        "time": slurm.time,
        "account": slurm.account,
        "partition": slurm.partition,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "reservation": slurm.reservation,
        "dependency": slurm.dependency,
        "mem": slurm.mem,
        "exclusive": slurm.exclusive or None,
        # To the tasks, not to this script: they stop at the end of a step and write a checkpoint.
        "signal": f"USR2@{slurm.stop_lead_s}",
        "requeue": True,
        "open-mode": "append",
        "export": _export(site),
    }
    if slurm.gres is not None:
        flags["gres"] = slurm.gres
    elif site.node.gpus and topology.device != "cpu":
        flags["gpus-per-node"] = topology.ranks_per_node
    if array_size is not None:
        flags["array"] = f"0-{array_size - 1}%{min(array_size, slurm.array_parallelism)}"
    kept = {name: value for name, value in flags.items() if value is not None}
    return kept | {name.replace("_", "-"): value for name, value in slurm.sbatch.items()}


def job_name(name: str) -> str:
    """A name that every program of Slurm prints whole."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-") or "rollplex"


def sbatch_text(job: JobScript) -> str:
    """The script."""
    log = _log(job)
    plain = PLAIN.match(str(job.run_dir)) is not None
    flags = dict(job.flags) | {"output": str(log) if plain else "/dev/null"}
    lines = ["#!/bin/bash", "", "# Parameters", *_flag_lines(flags), "", "# Run"]
    lines.append(f"run_dir={_run_dir(job)}")
    if not plain:
        # Slurm cannot be told a path with such characters, the shell can.
        lines.append('exec >>"$run_dir"/logs/slurm.log 2>&1')
    lines.append(f"cd -- {shlex.quote(str(job.work_dir))} || exit")
    lines += ["", "# Setup", *job.setup, *_environment_lines(job), "", "# Command", *_command(job), ""]
    return "\n".join(lines)


def _log(job: JobScript) -> Path:
    return RunFolder(job.run_dir / "%a" if job.array_size is not None else job.run_dir).job_log


def _run_dir(job: JobScript) -> str:
    path = shlex.quote(str(job.run_dir))
    return path if job.array_size is None else f'{path}/"$SLURM_ARRAY_TASK_ID"'


def _flag_lines(flags: Mapping[str, str | int | bool]) -> Iterator[str]:
    for name, value in sorted(flags.items()):
        if value is True:
            yield f"#SBATCH --{name}"
        elif value is not False:
            yield f"#SBATCH --{name}={shlex.quote(str(value)) if name != 'output' else value}"


def _environment_lines(job: JobScript) -> Iterator[str]:
    for name, value in sorted(job.environment.items()):
        yield f"export {name}={shlex.quote(value)}"
    yield f"export PYTHONPATH={shlex.quote(str(job.code_dir))}${{PYTHONPATH:+:$PYTHONPATH}}"
    # The copy of the program must win over a package of its name in the working folder.
    yield "export PYTHONSAFEPATH=1"


def _command(job: JobScript) -> Iterator[str]:
    python = shlex.join([*job.wrapper, job.python])
    srun = ["srun", "--export=ALL", "--kill-on-bad-exit=0", "--unbuffered"]
    if "cpus-per-task" in job.flags:
        # A step does not inherit it.
        srun.append(f"--cpus-per-task={job.flags['cpus-per-task']}")
    yield "# Slurm may signal this shell too; it has to outlive the tasks."
    yield "trap : TERM USR2"
    yield "code=0"
    yield f"{shlex.join([*srun, *job.srun])} \\"
    yield f'    {python} -m {NODE} "$run_dir" || code=$?'
    yield ""
    yield "# Again"
    yield f'next=$({python} -m {FINISH} "$run_dir" "$code" {job.max_requeues}) || code=$?'
    yield 'if [ "$next" = requeue ]; then'
    yield '    scontrol requeue "$SLURM_JOB_ID" && sleep 600'
    yield "fi"
    yield 'exit "$code"'


def _export(site: Site) -> str:
    if site.inherit_environment:
        return "ALL"
    return ",".join(site.pass_environment) or "NONE"
