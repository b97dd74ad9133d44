"""A job's wishes against the partition's limits, where `sinfo` answers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex_cli.core.units import format_seconds, parse_time_limit
from rollplex_cli.launch.check.findings import Finding, error, ok, skipped, warning
from rollplex_cli.launch.subprocess import run_text

if TYPE_CHECKING:
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.profile.site import Site

NAME = "slurm"
FORMAT = "%R|%a|%l|%D|%c|%m|%G|%f"
UNUSABLE = re.compile(r"^(down|drain|fail|maint|unk)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes of one kind in a partition, as `sinfo` prints them."""

    partition: str
    available: bool
    time_limit_s: int | None
    """None: no limit."""
    num_nodes: int
    cpus: int
    memory_mib: int
    gpus: int
    features: frozenset[str]


def parse_sinfo(text: str) -> list[Nodes]:
    """Rows of `sinfo -h -o` with `FORMAT`."""
    return [_nodes(cells) for line in text.splitlines() if len(cells := line.split("|")) == 8]


def default_partition(text: str) -> str | None:
    """The partition that `sinfo -h -o %P` marks with a star."""
    return next((line.strip().rstrip("*") for line in text.splitlines() if line.strip().endswith("*")), None)


def check_partition(profile: Profile, site: Site) -> Finding:
    """Time, nodes, CPUs, GPUs and features the job asks for against what the partition has."""
    name = site.slurm.partition
    listed = run_text(["sinfo", "-h", "-o", "%P"])
    if listed is None:
        return skipped(NAME, "`sinfo` does not answer here: the partition's limits are not known")
    name = name or default_partition(listed)
    known = sorted({line.strip().rstrip("*") for line in listed.splitlines() if line.strip()})
    if name is None or name not in known:
        asked = "none is asked for and there is no default one" if name is None else f"there is none called `{name}`"
        return error(NAME, f"no partition: {asked}", f"partitions here: {', '.join(known)}", exit_code=4)
    faults = partition_faults(profile, site, parse_sinfo(run_text(["sinfo", "-h", "-p", name, "-o", FORMAT]) or ""))
    if faults:
        return error(NAME, f"partition `{name}` cannot run the job", *faults, exit_code=4)
    states = (run_text(["sinfo", "-h", "-N", "-p", name, "-o", "%T"]) or "").split()
    usable = sum(not UNUSABLE.match(state) for state in states)
    if usable < profile.topology.num_nodes:
        text = f"partition `{name}` has {usable} usable nodes now, the job needs {profile.topology.num_nodes}"
        return warning(NAME, f"{text}: it would wait")
    return ok(NAME, f"partition `{name}` has what the job asks for, {usable} of {len(states)} nodes are usable")


def partition_faults(profile: Profile, site: Site, kinds: list[Nodes]) -> list[str]:
    """What no node of the partition can give, one line each. Pure."""
    faults = []
    if kinds and not any(kind.available for kind in kinds):
        faults.append("it is down or inactive")
    limit_s = next((kind.time_limit_s for kind in kinds if kind.time_limit_s is not None), None)
    wanted_s = parse_time_limit(site.slurm.time) if site.slurm.time else None
    if limit_s is not None and wanted_s is not None and wanted_s > limit_s:
        faults.append(f"`slurm.time` is {format_seconds(wanted_s)}, its limit is {format_seconds(limit_s)}")
    fitting = [kind for kind in kinds if _fits(profile, site, kind)]
    wanted, here = profile.topology.num_nodes, sum(kind.num_nodes for kind in fitting)
    if here < wanted:
        faults.append(f"{wanted} nodes needed{_wishes(profile, site)}, it has: {here}")
    return faults


def _fits(profile: Profile, site: Site, kind: Nodes) -> bool:
    needs_gpus = profile.topology.ranks_per_node if site.node.gpus and profile.topology.device != "cpu" else 0
    feature = site.slurm.constraint
    # A constraint with operators is Slurm's to judge.
    has_feature = feature is None or re.search(r"[^\w.-]", feature) is not None or feature in kind.features
    return (
        kind.cpus >= (site.node.cpus or 1) and (kind.gpus >= needs_gpus or site.slurm.gres is not None) and has_feature
    )


def _wishes(profile: Profile, site: Site) -> str:
    wishes = []
    if site.node.cpus:
        wishes.append(f"{site.node.cpus} CPUs")
    if site.node.gpus and profile.topology.device != "cpu" and site.slurm.gres is None:
        wishes.append(f"{profile.topology.ranks_per_node} GPUs")
    if site.slurm.constraint:
        wishes.append(f"the feature `{site.slurm.constraint}`")
    return f" with {', '.join(wishes)} each" if wishes else ""


def _nodes(cells: list[str]) -> Nodes:
    partition, up, limit, count, cpus, memory, gres, features = (cell.strip() for cell in cells)
    return Nodes(
        partition=partition,
        available=up == "up",
        time_limit_s=parse_time_limit(limit),
        num_nodes=_number(count),
        cpus=_number(cpus),
        memory_mib=_number(memory),
        gpus=sum(int(found) for found in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", gres)),
        features=frozenset(features.split(",")),
    )


def _number(text: str) -> int:
    # `128+` where the nodes of a row differ: the smallest of them
    found = re.match(r"\d+", text)
    return int(found.group()) if found else 0
