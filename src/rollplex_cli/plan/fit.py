"""Does a plan fit a machine? The verdict names everything that is missing, not the first thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex_cli.core.units import format_bytes, format_count
from rollplex_cli.plan.memory.advice import Advice, Limits, advise
from rollplex_cli.plan.memory.objects import CHUNKS_IN_FLIGHT, IN_REGIONS, chunk_bytes

if TYPE_CHECKING:
    from rollplex_cli.plan.build import Plan

SHOWN_OBJECTS = 3
"""Largest objects that a message names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What one node offers."""

    num_nodes: int = 1
    gpu_bytes: tuple[int, ...] = ()
    """Memory of each visible GPU."""
    host_bytes: int | None = None
    """Memory of the node; None if unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a plan fits, and why not."""

    reasons: tuple[str, ...]
    """One line per thing that is missing; empty if the plan fits."""
    needs: tuple[str, ...]
    """What the job needs, one line each, whether it fits or not."""

    @property
    def fits(self) -> bool:
        """True if nothing is missing."""
        return not self.reasons


def fit(plan: Plan, machine: Machine) -> Verdict:
    """Compare a plan with a machine. Unknown sizes count as enough."""
    reasons: list[str] = []
    topology = plan.topology
    if topology.num_nodes > machine.num_nodes:
        reasons.append(f"nodes: {topology.num_nodes} needed, {machine.num_nodes} here")
    wanted = topology.ranks_per_node
    if plan.device == "cuda" and len(machine.gpu_bytes) < wanted:
        reasons.append(f"GPUs per node: {wanted} needed, {len(machine.gpu_bytes)} visible here")
    reasons += memory_reasons(plan, machine)
    return Verdict(reasons=tuple(reasons), needs=needs(plan))


def _device_limit(plan: Plan, machine: Machine) -> int | None:
    gpus = machine.gpu_bytes[: plan.topology.ranks_per_node] if plan.device == "cuda" else ()
    limits = [*gpus, *([plan.budget_bytes] if plan.budget_bytes is not None else [])]
    return min(limits) if limits else None


def _host_limit(plan: Plan, machine: Machine) -> int | None:
    limits = [size for size in (plan.host_budget_bytes, machine.host_bytes) if size is not None]
    return min(limits) if limits else None


def memory_reasons(plan: Plan, machine: Machine) -> list[str]:
    """What is missing of device and host memory, one line each."""
    reasons, limit = [], _device_limit(plan, machine)
    if limit is not None and plan.memory.budgeted_bytes > limit:
        reasons.append(_peak_reason(plan, limit))
        if (chunks := chunk_bytes(plan.memory_inputs)) > limit:
            reasons.append(
                f"`optimizer.chunk_elements`: {CHUNKS_IN_FLIGHT} chunks of {plan.memory_inputs.chunk_elements} "
                f"parameters in flight take {format_bytes(chunks)} by themselves"
            )
    host = _host_limit(plan, machine)
    if host is not None and plan.node_host_bytes > host:
        held = ", ".join(f"{item.name} {format_bytes(item.bytes)}" for item in plan.memory.host_objects)
        needed = format_bytes(plan.node_host_bytes)
        reasons.append(
            f"host memory per node: {needed} needed ({plan.topology.ranks_per_node} ranks, each {held}), "
            f"{format_bytes(host)} available"
        )
    return reasons


def _peak_reason(plan: Plan, limit: int) -> str:
    if plan.device == "cuda":
        what, moment = "memory per GPU", plan.memory.peak_moment()
        objects = moment.objects
    else:
        what, moment = "regions per rank", max(plan.memory.moments, key=lambda moment: moment.region_bytes)
        objects = {name: size for name, size in moment.objects.items() if name in IN_REGIONS}
    largest = sorted(objects.items(), key=lambda item: -item[1])[:SHOWN_OBJECTS]
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)
    needed = f"{format_bytes(plan.memory.budgeted_bytes)} needed at the peak"
    return f"{what}: {needed} ({moment.phase}, {moment.name}: {held}, ...), {format_bytes(limit)} available"


def advice_for(plan: Plan, machine: Machine) -> Advice | None:
    """The smallest change of the profile with which its memory fits; None where it does."""
    host = _host_limit(plan, machine)
    per_rank = None if host is None else host // plan.topology.ranks_per_node
    return advise(plan.memory_inputs, Limits(device_bytes=_device_limit(plan, machine), host_bytes=per_rank))


def advice_text(advice: Advice) -> str:
    """One sentence, with the options to give."""
    if not advice.fits:
        return (
            f"no change of the profile is enough: the furthest would still take {format_bytes(advice.peak_bytes)} of "
            f"device and {format_bytes(advice.host_bytes)} of host memory a rank"
        )
    settings = " ".join(f"--set {setting}" for setting in advice.settings)
    kind = "changes the job" if advice.changes_job else "changes no result"
    return f"the smallest change that fits ({format_bytes(advice.peak_bytes)} at the peak, {kind}): {settings}"


def needs(plan: Plan) -> tuple[str, ...]:
    """What a job needs, one line each."""
    topology, memory = plan.topology, plan.memory
    ranks = f"{topology.num_ranks} (data parallel {topology.data_parallel} x train TP {topology.train_tp}"
    halves = f", ranks {topology.num_training_ranks} and up decode" if topology.disaggregated else ""
    lines = [
        f"model: {plan.model.name}, {format_count(plan.model.num_parameters)} parameters",
        f"nodes: {topology.num_nodes}",
        f"ranks: {ranks}, rollout TP {topology.rollout_tp}{halves})",
    ]
    if plan.device == "cuda":
        lines.append(f"GPUs: {topology.num_ranks}, {topology.ranks_per_node} per node")
        budget = f" (budget {format_bytes(plan.budget_bytes)})" if plan.budget_bytes is not None else ""
        lines.append(f"memory per GPU: {format_bytes(memory.peak_bytes)} at the peak{budget}")
    else:
        lines.append(f"memory per rank: {format_bytes(memory.peak_bytes)} at the peak")
    lines.append(f"host memory per node: {format_bytes(plan.node_host_bytes)}")
    return tuple(lines)
