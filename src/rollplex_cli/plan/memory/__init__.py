"""The memory plan of one rank: every object of the lifetime table in bytes, before anything runs.

Upper bounds from the profile's limits, every figure a product. Pure functions of `MemoryInputs`.
"""

from rollplex_cli.plan.memory.inputs import ABLATIONS, RELEASES, Ablation, MemoryInputs
from rollplex_cli.plan.memory.ledger import MemoryLedger, ablation_costs, compute_memory
from rollplex_cli.plan.memory.objects import PHASES, Moment

__all__ = [
    "ABLATIONS",
    "PHASES",
    "RELEASES",
    "Ablation",
    "MemoryInputs",
    "MemoryLedger",
    "Moment",
    "ablation_costs",
    "compute_memory",
]
