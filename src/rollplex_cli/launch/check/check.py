"""All checks of a job in order, the cheap ones first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollplex_cli.launch.check.cluster import check_partition
from rollplex_cli.launch.check.data import check_data
from rollplex_cli.launch.check.findings import skipped
from rollplex_cli.launch.check.job import (
    check_lead,
    check_memory,
    check_model,
    check_ports,
    check_topology,
    machine_of,
)
from rollplex_cli.launch.machine import detect_machine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rollplex_cli.core.paths import RunFolder
    from rollplex_cli.launch.check.findings import Finding
    from rollplex_cli.plan.build import Plan
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.profile.site import Site


def check_job(
    profile: Profile,
    plan: Plan,
    site: Site | None,
    *,
    num_samples: int,
    run: RunFolder | None = None,
    data: bool = True,
) -> Iterator[Finding]:
    """Findings as they come.

    Args:
        site: where the job will run; None stands for this machine.
        num_samples: rows whose media are opened.
        run: an earlier start of the same run, for what it measured.
        data: whether to look at the data at all.
    """
    yield from quick_checks(profile, plan, site)
    if site is not None:
        yield check_partition(profile, site)
        yield check_lead(run, site)
    model = check_model(profile, plan)
    yield model
    if not data:
        yield skipped("data", "left out as asked")
    elif model.level == "error":
        yield skipped("data", "needs the model's tokenizer")
    else:
        yield from check_data(profile, num_samples)


def quick_checks(profile: Profile, plan: Plan, site: Site | None) -> Iterator[Finding]:
    """What a plan alone tells: topology, memory, ports."""
    yield check_topology(plan)
    if site is None:
        yield check_memory(plan, detect_machine(look_for_gpus=plan.device != "cpu"), "this machine")
        yield check_ports(profile)
    else:
        yield check_memory(plan, machine_of(site, plan), f"site `{site.name}`")
