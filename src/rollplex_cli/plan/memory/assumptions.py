"""What the memory plan takes for granted, as sentences with their values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollplex_cli.core.units import format_bytes
from rollplex_cli.plan.memory.activations import decoder_layer, vision_features
from rollplex_cli.plan.memory.inputs import STATE_BYTES
from rollplex_cli.plan.memory.ledger import LINK_BYTES_PER_S
from rollplex_cli.plan.memory.objects import CHUNKS_IN_FLIGHT, chunk_bytes, foreign_bytes, overhead_bytes

if TYPE_CHECKING:
    from rollplex_cli.plan.memory.inputs import MemoryInputs


def assumptions(inputs: MemoryInputs) -> tuple[str, ...]:
    """One sentence each, without a full stop."""
    found = [
        f"Every prompt has {inputs.max_prompt_tokens} tokens, all of them media, and every response "
        f"{inputs.max_new_tokens}: the profile's limits",
        f"{inputs.groups} prompt groups of {inputs.group_size} responses a training group (train TP {inputs.train_tp}, "
        f"rollout TP {inputs.rollout_tp}); boundaries held at once by each role: {inputs.held_groups}",
        f"One group is trained at a time: {inputs.suffix_rows} rows, {decoder_layer(inputs).kept} bytes a row and "
        f"layer for autograd; {inputs.kept_layers} of {inputs.shape.num_layers} layers kept, the others run again",
        f"Gradients are float32 ({format_bytes(4 * inputs.trained_parameters)}), optimizer state "
        f"{STATE_BYTES[inputs.master]} bytes a parameter on the host, shared out over data-parallel ranks: "
        f"{inputs.data_parallel}",
    ]
    if inputs.on_gpu:
        found.append(
            f"{CHUNKS_IN_FLIGHT} optimizer chunks of {inputs.chunk_elements} parameters in flight: "
            f"{format_bytes(chunk_bytes(inputs))} with scratch"
        )
    if foreign := foreign_bytes(inputs):
        found.append(
            f"Between decode and publish a rank unmaps the row ranges that others train ({format_bytes(foreign)} of "
            "whole pages); their columns lie between its own and stay"
        )
    if inputs.resident:
        found.append("`memory.residency: resident`: weights, KV pool and gradients have memory through the whole step")
    elif inputs.reference_bytes:
        found.append(
            "The reference is released after its last suffix, before the actor's first; a host copy brings it back"
        )
    if inputs.adapter_parameters:
        found.append("Only adapters are trained; the base under them is the reference and has no second copy")
    elif inputs.freeze_vision:
        found.append("The vision tower has no gradients, no optimizer state and no backward")
    if inputs.held_features:
        found.append(
            f"The vision tower's output is held until a group's prefix backward, of {inputs.held_features} groups at "
            f"once: {format_bytes(inputs.held_features * vision_features(inputs))}"
        )
    if inputs.on_gpu:
        found += [
            "Attention never holds scores (FlashAttention), and no allocator's slack is counted",
            f"Context, decode graphs, libraries' workspaces and, with several ranks, communication buffers take "
            f"{format_bytes(overhead_bytes(inputs))} (measured on one rank, the buffers estimated)",
            f"The host link moves {LINK_BYTES_PER_S / 1e9:.0f} GB/s each way while both ways are busy (measured)",
        ]
    found += [
        "Host memory counts the planned objects; interpreter and libraries come on top",
        "Without a measure its object stays through the whole step; without chunks master and moments are float32 in "
        "device memory, whole on each data-parallel rank; `naive` leaves out all measures, holds every object at its "
        "largest at once, and a second copy of the training shard",
    ]
    return tuple(found)
