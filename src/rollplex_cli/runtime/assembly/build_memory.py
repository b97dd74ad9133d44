"""The managed memory of a rank, and where the engines' objects lie in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rollplex_cli.core.units import GIB
from rollplex_cli.engines.trainer.arena import FlatMemory
from rollplex_cli.memory.manager import MemoryManager
from rollplex_cli.memory.meter import PhaseMeter
from rollplex_cli.memory.regions import Content
from rollplex_cli.memory.residency import Policy, Residency
from rollplex_cli.memory.vmm import open_driver
from rollplex_cli.memory.vmm.host import available_bytes
from rollplex_cli.runtime.assembly.devices import device_of, gpu_index

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rollplex_cli.memory.manager import ResidencyChange
    from rollplex_cli.profile.schema import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What manages a rank's memory, and what measures it."""

    residency: Residency
    meter: PhaseMeter

    @property
    def manager(self) -> MemoryManager:
        """Regions and budgets."""
        return self.residency.manager


def build_memory(
    profile: Profile, *, where: Callable[[], str], on_change: Callable[[ResidencyChange], None]
) -> RankMemory:
    """Budgets and driver of this rank. Call it on a lane whose device is set.

    Args:
        where: see `Residency`.
        on_change: hears of every map and unmap.

    Raises:
        DoesNotFitError: a GPU without virtual memory management.
    """
    device, settings = device_of(profile), profile.memory
    driver = open_driver(device if device == "cpu" else f"{device}:{gpu_index()}")
    budget = driver.total_bytes() if settings.budget_gib is None else round(settings.budget_gib * GIB)
    host = available_bytes() if settings.host_budget_gib is None else round(settings.host_budget_gib * GIB)

    def changed(change: ResidencyChange) -> None:
        meter.changed()
        on_change(change)

    # The profile's host budget is that of a node, for its ranks that train.
    ranks = profile.topology.ranks_per_node
    host_share = host // (max(1, min(ranks, profile.num_ranks // 2)) if profile.disaggregated else ranks)
    manager = MemoryManager(driver, budget_bytes=budget, host_budget_bytes=host_share, on_change=changed)
    meter = PhaseMeter(manager, capped=settings.budget_gib is not None)
    return RankMemory(residency=Residency(manager, Policy(settings.residency), where=where), meter=meter)


def place_weights(
    residency: Residency, foreign: Mapping[str, Sequence[tuple[int, int]]], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The rollout's parameters as views of one region, with their values; the trainer's are views of them.

    What a rank trains of them is used in every phase. Rows that other ranks train (`foreign`, as `foreign_rows` gives
    them) go between decode and publish; their columns of row-parallel weights cannot, since every row holds some of
    both.
    """
    specs = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    row_bytes = {name: t[0].numel() * t.element_size() for name, t in tensors.items() if name in foreign}
    may_go = {
        name: [(first * row_bytes[name], count * row_bytes[name]) for first, count in foreign[name]]
        for name in row_bytes
    }
    placed = residency.place("snapshot", specs, stays=True, may_go=may_go)
    for name, tensor in tensors.items():
        placed[name].copy_(tensor)
    return placed


def place_key_values(
    residency: Residency, k_shape: tuple[int, ...], v_shape: tuple[int, ...], dtype: torch.dtype, num_layers: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The rollout's KV pool: zeroed buffers of all layers in one region."""
    shapes = {"k": k_shape, "v": v_shape}
    specs = {f"{part}{layer}": (shapes[part], dtype) for layer in range(num_layers) for part in "kv"}
    placed = residency.place("rollout_kv", specs)
    for tensor in placed.values():
        tensor.zero_()
    return [placed[f"k{layer}"] for layer in range(num_layers)], [placed[f"v{layer}"] for layer in range(num_layers)]


def gradient_memory(residency: Residency) -> FlatMemory:
    """A region for the gradient arena. Its content is not kept: gradients begin as zeros in every lifetime."""

    def place(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return residency.place("gradients", {"flat": ((numel,), dtype)}, content=Content.ZEROED)["flat"]

    return FlatMemory(place, lambda: residency.is_mapped("gradients"))


def place_staging(residency: Residency, num_bytes: int) -> None:
    """A region for the chunks that an update streams through a GPU; a CPU updates the host's arrays where they lie."""
    if residency.manager.memory.driver.device != "cpu":
        residency.place("optimizer_chunks", {"bytes": ((num_bytes,), torch.uint8)})
        residency.rest("optimizer_chunks")


def optimizer_staging(residency: Residency) -> Callable[[int], torch.Tensor] | None:
    """What gives an update its staging memory: the region while it is leased, PyTorch's allocator outside of steps
    (weights that ranks share after a resume). None on a CPU."""
    device = residency.manager.memory.driver.device
    if device == "cpu":
        return None

    def staging(num_bytes: int) -> torch.Tensor:
        if residency.is_mapped("optimizer_chunks"):
            return residency.manager.get("optimizer_chunks").tensor("bytes")[:num_bytes]
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    return staging
