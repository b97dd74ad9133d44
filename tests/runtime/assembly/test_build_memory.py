"""Where the engines' objects lie."""

from __future__ import annotations

from rollplex_cli.core.units import GIB, MIB
from rollplex_cli.memory.manager import MemoryManager, ResidencyChange
from rollplex_cli.memory.residency import Policy, Residency
from rollplex_cli.memory.vmm.host import HostDriver
from rollplex_cli.profile.load import load_profile
from rollplex_cli.runtime.assembly.build_memory import build_memory, optimizer_staging, place_staging


def test_a_cpu_updates_the_hosts_arrays_where_they_lie() -> None:
    residency = Residency(MemoryManager(HostDriver(MIB), budget_bytes=MIB, host_budget_bytes=0))
    place_staging(residency, 4096)
    assert optimizer_staging(residency) is None
    assert not residency.is_mapped("optimizer_chunks")
    residency.close()


def test_budgets_are_the_profiles_and_the_host_one_is_shared_by_the_nodes_ranks() -> None:
    changes: list[ResidencyChange] = []
    keys = ["memory.budget_gib=0.5", "memory.host_budget_gib=1", "topology.ranks_per_node=2", "topology.device=cpu"]
    job = load_profile("tiny", [*keys, "memory.residency=resident"])
    memory = build_memory(job, where=lambda: "a test", on_change=changes.append)
    assert (memory.manager.budget_bytes, memory.manager.host.budget_bytes) == (GIB // 2, GIB // 2)
    assert memory.residency.policy is Policy.RESIDENT
    memory.manager.region("gradients", MIB)
    memory.manager.map("gradients")
    assert [change.regions for change in changes] == [("gradients",)]
    assert memory.meter.end_phase().regions == {"gradients": MIB}
    memory.residency.close()
