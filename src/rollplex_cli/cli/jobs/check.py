"""`rollplex check`: everything that can be known before a GPU is held."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from rollplex_cli.cli import options
from rollplex_cli.cli.output import print_json, printable, set_json_mode
from rollplex_cli.core.log import talk

if TYPE_CHECKING:
    from rich.text import Text

    from rollplex_cli.launch.check.findings import Finding

SiteOption = Annotated[
    str | None,
    typer.Option("--site", envvar="ROLLPLEX_SITE", help="A shipped site's name, or a YAML file.", show_default=False),
]
NUM_SAMPLES = 200
STYLES = {"ok": "green", "warning": "yellow", "error": "red", "skipped": "dim"}


def check(
    profile: options.ProfileOption = options.DEFAULT_PROFILE,
    set_: options.SetOption = None,
    site: SiteOption = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Rows of the data to open.")] = NUM_SAMPLES,
    no_data: Annotated[bool, typer.Option("--no-data", help="Leave out data and reward.")] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Check a job without running it: keys, model, data, reward, topology, memory, ports, the cluster's limits.

    Without `--site` the job is compared with this machine. Exits 0 if nothing is wrong, else with the code that the
    job itself would have ended with.
    """
    from rollplex_cli.launch.check.check import check_job
    from rollplex_cli.launch.check.findings import exit_code_of
    from rollplex_cli.profile.load import load_site

    set_json_mode(as_json)
    place = load_site(site) if site is not None else None
    job, plan = options.load_for(profile, set_, place)
    findings = []
    if not no_data and not as_json:
        talk(f"checking `{job.name}`; data and reward take some seconds")
    for finding in check_job(job, plan, place, num_samples=samples, data=not no_data):
        findings.append(finding)
        if not as_json:
            show(finding)
    if as_json:
        print_json({"findings": [dataclasses.asdict(f) for f in findings], "exit_code": exit_code_of(findings)})
    if code := exit_code_of(findings):
        raise typer.Exit(code)


def show(finding: Finding, *, to_stderr: bool = False) -> None:
    """One finding with its details."""
    from rollplex_cli.cli.output import stderr_console, stdout_console

    console = stderr_console() if to_stderr else stdout_console()
    console.print(_line(finding), soft_wrap=True)


def _line(finding: Finding) -> Text:
    from rich.text import Text

    text = Text()
    text.append(f"{finding.level:8}", style=STYLES[finding.level])
    text.append(f"{finding.name:12} {printable(finding.text)}")
    for detail in finding.details:
        text.append(f"\n{'':21} {printable(detail)}")
    return text
