"""Does a plan fit a machine? The verdict names everything that is missing, not the first thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex_cli.core.units import format_bytes, format_count

if TYPE_CHECKING:
    from rollplex_cli.plan.build import Plan


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
    if plan.device == "cuda":
        reasons += _gpu_reasons(plan, machine)
    available = [size for size in (plan.host_budget_bytes, machine.host_bytes) if size is not None]
    if available and plan.node_host_bytes > min(available):
        needed = format_bytes(plan.node_host_bytes)
        reasons.append(f"host memory per node: {needed} needed, {format_bytes(min(available))} available")
    return Verdict(reasons=tuple(reasons), needs=needs(plan))


def _gpu_reasons(plan: Plan, machine: Machine) -> list[str]:
    reasons, wanted = [], plan.topology.ranks_per_node
    if len(machine.gpu_bytes) < wanted:
        reasons.append(f"GPUs per node: {wanted} needed, {len(machine.gpu_bytes)} visible here")
    peak = plan.memory.peak_bytes
    limits = [*machine.gpu_bytes[:wanted], *([plan.budget_bytes] if plan.budget_bytes is not None else [])]
    if limits and peak > min(limits):
        needed, available = format_bytes(peak), format_bytes(min(limits))
        reasons.append(f"memory per GPU: {needed} needed at the peak, {available} available")
    return reasons


def needs(plan: Plan) -> tuple[str, ...]:
    """What a job needs, one line each."""
    topology, memory = plan.topology, plan.memory
    ranks = f"{topology.num_ranks} (data parallel {topology.data_parallel} x train TP {topology.train_tp}"
    lines = [
        f"model: {plan.model.name}, {format_count(plan.model.num_parameters)} parameters",
        f"nodes: {topology.num_nodes}",
        f"ranks: {ranks}, rollout TP {topology.rollout_tp})",
    ]
    if plan.device == "cuda":
        lines.append(f"GPUs: {topology.num_ranks}, {topology.ranks_per_node} per node")
        budget = f" (budget {format_bytes(plan.budget_bytes)})" if plan.budget_bytes is not None else ""
        lines.append(f"memory per GPU: {format_bytes(memory.peak_bytes)} at the peak{budget}")
    else:
        lines.append(f"memory per rank: {format_bytes(memory.peak_bytes)} at the peak")
    lines.append(f"host memory per node: {format_bytes(plan.node_host_bytes)}")
    return tuple(lines)
