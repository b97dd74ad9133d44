"""Options that several commands share, and the profile they lead to."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder
    from rollplex_cli.plan.build import Plan
    from rollplex_cli.plan.fit import Machine
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.profile.site import Site

DEFAULT_PROFILE = "tiny"
RUNS = Path("runs")

ProfileOption = Annotated[
    str,
    typer.Option("--profile", "-p", envvar="ROLLPLEX_PROFILE", help="A shipped profile's name, or a YAML file."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a profile key, as in `runtime.seed=1`. Repeatable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else there.")]
RunDirOption = Annotated[
    Path | None, typer.Option("--run-dir", help="Folder of the run [default: ./runs/PROFILE-TIME].", show_default=False)
]
PlainOption = Annotated[bool, typer.Option("--plain", help="One line per step instead of a live display.")]


def load_for(name: str, overrides: list[str] | None, site: Site | None) -> tuple[Profile, Plan]:
    """The profile and its plan for a site; None stands for this machine, which then decides an open device."""
    if site is None:
        profile, plan, _machine = load(name, overrides)
        return profile, plan
    from rollplex_cli.profile.load import load_profile

    profile = load_profile(name, overrides or [])
    if profile.topology.device == "auto":
        profile = _with_device(profile, "cuda" if site.node.gpus else "cpu")
    return _planned(profile)


def load(name: str, overrides: list[str] | None) -> tuple[Profile, Plan, Machine]:
    """The profile with its device decided, its plan, and this machine."""
    from rollplex_cli.launch.machine import detect_machine
    from rollplex_cli.profile.load import load_profile

    profile = _anchored(load_profile(name, overrides or []))
    machine = detect_machine(look_for_gpus=profile.topology.device != "cpu")
    if profile.topology.device == "auto":
        profile = _with_device(profile, "cuda" if machine.gpu_bytes else "cpu")
    gpus = machine.gpu_bytes[: profile.topology.ranks_per_node] if profile.topology.device == "cuda" else ()
    return *_planned(profile, min(gpus, default=None)), machine


def _planned(profile: Profile, device_bytes: int | None = None) -> tuple[Profile, Plan]:
    """The plan, and the profile with what the plan has decided."""
    from rollplex_cli.plan.build import build_plan
    from rollplex_cli.plan.kept import with_kept_prefixes

    plan = build_plan(profile, device_bytes)
    return with_kept_prefixes(profile, plan.memory_inputs), plan


def _with_device(profile: Profile, device: Literal["cpu", "cuda"]) -> Profile:
    return dataclasses.replace(profile, topology=dataclasses.replace(profile.topology, device=device))


def _anchored(profile: Profile) -> Profile:
    """The profile with paths made absolute: a run may be resumed from another directory."""
    from rollplex_cli.core.resources import model_config_names, shipped_folder, task_folder

    task, model = profile.task, profile.model
    if not (shipped_folder("jobs") / "tasks" / task.name).is_dir() and (folder := task_folder(task.name)) is not None:
        task = dataclasses.replace(task, name=str(folder))
    if model.config not in model_config_names() and (Path(model.config).expanduser() / "config.json").is_file():
        model = dataclasses.replace(model, config=str(Path(model.config).expanduser().resolve()))
    return dataclasses.replace(profile, task=task, model=model)


def require_fit(plan: Plan, machine: Machine) -> None:
    """Raise DoesNotFitError with all that is missing and all that the job needs."""
    from rollplex_cli.core.errors import DoesNotFitError
    from rollplex_cli.plan.fit import advice_for, advice_text, fit

    verdict = fit(plan, machine)
    if not verdict.fits:
        lines = [*verdict.reasons, f"profile `{plan.profile_name}` needs", *(f"  {line}" for line in verdict.needs)]
        advice = advice_for(plan, machine)
        raise DoesNotFitError(
            "the job does not fit this machine" + "".join(f"\n  {line}" for line in lines),
            hint=None if advice is None else advice_text(advice),
        )


def new_run(profile: Profile, plan: Plan, run_dir: Path | None, argv: list[str], prefix: str = "") -> RunFolder:
    """A fresh run folder, by default under ./runs; its plan has the steps of `profile`, which may be fewer or more than
    those that were planned (a benchmark's, a measurement's)."""
    from rollplex_cli.launch.run_folder import create_run, default_run_dir
    from rollplex_cli.profile.dump import resolved_yaml

    plan = dataclasses.replace(plan, max_steps=profile.runtime.max_steps)
    root = run_dir or default_run_dir(RUNS, prefix + profile.name)
    return create_run(root, profile_yaml=resolved_yaml(profile), plan_json=plan.to_json(), argv=argv)
