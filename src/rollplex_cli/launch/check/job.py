"""Checks of a job's plan: topology, memory, ports, the model's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import ClusterError
from rollplex_cli.core.files import read_json
from rollplex_cli.core.resources import model_config_names
from rollplex_cli.core.units import GIB, format_bytes, format_count
from rollplex_cli.launch.check.findings import Finding, error, ok, skipped, warning
from rollplex_cli.launch.slurm.lead import lead_warning, measure
from rollplex_cli.launch.torchrun import choose_port
from rollplex_cli.plan.fit import Machine, advice_for, advice_text, fit

if TYPE_CHECKING:
    from rollplex_cli.core.paths import RunFolder
    from rollplex_cli.plan.build import Plan
    from rollplex_cli.profile.schema import Profile
    from rollplex_cli.profile.site import Site

TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
INDEX = "model.safetensors.index.json"


def machine_of(site: Site, plan: Plan) -> Machine:
    """What a site's nodes offer; keys the site leaves out count as enough."""
    node = site.node
    gpus = (round((node.gpu_gib or 1e6) * GIB),) * node.gpus
    host = None if node.host_gib is None else round(node.host_gib * GIB)
    return Machine(num_nodes=plan.topology.num_nodes, gpu_bytes=gpus, host_bytes=host)


def check_topology(plan: Plan) -> Finding:
    """Never an error: a topology that does not divide has no plan."""
    place = plan.topology
    halves = f", ranks {place.num_training_ranks} and up decode" if place.disaggregated else ""
    text = (
        f"{place.num_ranks} ranks = {place.num_nodes} nodes x {place.ranks_per_node}: data parallel "
        f"{place.data_parallel} x train TP {place.train_tp}, rollout TP {place.rollout_tp}{halves}"
    )
    return ok("topology", text)


def check_memory(plan: Plan, machine: Machine, where: str) -> Finding:
    """The plan's peak against the budget and the nodes."""
    verdict = fit(plan, machine)
    if not verdict.fits:
        advice = advice_for(plan, machine)
        hint = [] if advice is None else [advice_text(advice)]
        return error("memory", f"does not fit {where}", *verdict.reasons, *hint, exit_code=3)
    peak, host = format_bytes(plan.memory.peak_bytes), format_bytes(plan.node_host_bytes)
    budget = "no budget" if plan.budget_bytes is None else f"budget {format_bytes(plan.budget_bytes)}"
    return ok("memory", f"{peak} a rank at the peak ({budget}), {host} of host memory a node, on {where}")


def check_ports(profile: Profile) -> Finding:
    """The rendezvous port, where the profile fixes one."""
    wanted = profile.runtime.master_port
    if not wanted:
        return ok("ports", "the rendezvous takes a free port")
    try:
        choose_port(wanted)
    except ClusterError as fault:
        return error("ports", fault.message, *([fault.hint] if fault.hint else []), exit_code=4)
    return ok("ports", f"port {wanted} is free here")


def check_model(profile: Profile, plan: Plan) -> Finding:
    """Configuration, weights and tokenizer of the model: are the files there and whole?"""
    size = f"{plan.model.name}, {format_count(plan.model.num_parameters)} parameters"
    if profile.model.init != "checkpoint":
        return ok("model", f"{size}, weights are made when the run is prepared (`{profile.model.init}`)")
    folder = Path(profile.model.config).expanduser()
    if profile.model.config in model_config_names():
        text = f"`model.init: checkpoint` needs a folder with weights in `model.config`: {profile.model.config}"
        return error("model", text)
    missing = missing_files(folder)
    if missing:
        return error("model", f"files are missing in `{folder}`", *missing)
    return ok("model", f"{size}, weights and tokenizer in `{folder}`")


def missing_files(folder: Path) -> list[str]:
    """What a checkpoint folder lacks, one line each."""
    missing = []
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append(f"a tokenizer ({' or '.join(TOKENIZER_FILES)})")
    if not (folder / "preprocessor_config.json").is_file() and not (folder / "processor_config.json").is_file():
        missing.append("an image processor (preprocessor_config.json)")
    index = read_json(folder / INDEX)
    if index is not None:
        shards = sorted(set(index.get("weight_map", {}).values()))
        absent = [name for name in shards if not (folder / name).is_file()]
        missing += [f"{len(absent)} of {len(shards)} files of weights, the first is {absent[0]}"] if absent else []
    elif not (folder / "model.safetensors").is_file():
        missing.append(f"weights (model.safetensors or {INDEX})")
    return missing


def check_lead(run: RunFolder | None, site: Site) -> Finding:
    """The stop signal's lead time against what an earlier start of the run measured."""
    measured = measure(run) if run is not None else None
    lead_s = site.slurm.stop_lead_s
    if measured is None:
        return skipped("stop signal", f"{lead_s} s before the time limit; no step has been measured yet")
    text = lead_warning(measured, lead_s)
    if text is not None:
        return warning("stop signal", text)
    return ok("stop signal", f"{lead_s} s before the time limit, {measured.needed_s:.0f} s are needed")


def dumped(findings: list[Finding]) -> str:
    """As JSON text."""
    rows = [{"name": f.name, "level": f.level, "text": f.text, "details": list(f.details)} for f in findings]
    return json.dumps(rows)
