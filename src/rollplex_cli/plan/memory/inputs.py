"""What the memory plan is computed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rollplex_cli.plan.model import ModelShape, shard_count

if TYPE_CHECKING:
    from rollplex_cli.plan.vision import VisionSource

PrefixActivations = Literal["keep", "device", "host", "recompute"]
Master = Literal["full", "split"]
Ablation = Literal["no-kv-release", "no-reference-release", "no-snapshot-release", "no-optimizer-chunks", "naive"]
Role = Literal["both", "training", "rollout"]
"""Which engines a rank holds."""
ABLATIONS: tuple[Ablation, ...] = (
    "no-kv-release",
    "no-reference-release",
    "no-snapshot-release",
    "no-optimizer-chunks",
    "naive",
)
"""Measures that can be left out, and `naive`, which leaves out all of them and the sharing of the weights."""

RELEASES: dict[str, Ablation] = {
    "kv-release": "no-kv-release",
    "reference-release": "no-reference-release",
    "snapshot-release": "no-snapshot-release",
}
"""Measures that a running job can do without, by what a benchmark calls them."""

FLOAT32_BYTES = 4
STATE_BYTES: dict[Master, int] = {"full": 12, "split": 10}
"""Of a trained parameter on the host, and over the link each way: float32 master (or the 16 bits that the device's
BF16 weight lacks), first and second moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryInputs:
    """A job as far as memory is concerned. Counts are per rank unless a name says otherwise."""

    shape: ModelShape
    train_tp: int
    rollout_tp: int
    data_parallel: int
    groups: int
    """Prompt groups of a training group in a step, those in flight beyond its share included."""
    prefixes_in_flight: int
    """Limit on boundaries held ahead of use; 0 is none."""
    group_size: int
    max_prompt_tokens: int
    max_new_tokens: int
    kv_tokens: int
    max_running_requests: int
    chunked_prefill_tokens: int
    bytes_per_value: int
    """Of weights and activations: 2 for bfloat16, 4 for float32."""
    has_reference: bool
    overlap: bool
    """Whether prefixes run beside decode (schedule `rollplex`)."""
    early_groups: bool
    """Whether groups are trained while others still decode."""
    prefix_activations: PrefixActivations
    suffix_kept_layers: int | None
    """Decoder layers, from the last, whose suffix activations are kept; None keeps all."""
    freeze_vision: bool
    chunk_elements: int
    master: Master
    prompt_cache_bytes: int
    """Host memory for prompts that are built already."""
    on_gpu: bool
    prefix_kept_tokens: int | None = None
    """Limit on the tokens of prompts whose prefix activations are held; None is none."""
    prefix_pack_tokens: int = 0
    """Tokens of prompts that run in one pass; 0 where they run alone."""
    adapter_parameters: int = 0
    """Elements of LoRA adapters in a training shard; 0 trains the weights themselves. Goes with `freeze_vision`."""
    vision_of_rollout: bool = False
    """Whether the trainer takes the vision tower's output from the rollout."""
    share_frozen_vision: bool = False
    """Whether reference and actor share a run of a frozen vision tower."""
    resident: bool = False
    """Whether what lies in regions has memory through the whole step (`memory.residency`)."""
    role: Role = "both"
    without: frozenset[Ablation] = frozenset()
    """Measures left out."""

    @property
    def held_groups(self) -> int:
        """Groups whose boundary is held at once by a role."""
        if not self.overlap and not self.prefix_pack_tokens:
            return 1  # role by role, group by group
        # The group next in order is exempt from the limit.
        return min(self.groups, self.prefixes_in_flight + 1) if self.prefixes_in_flight else self.groups

    @property
    def held_prompt_tokens(self) -> int:
        """Tokens of the prompts whose boundaries a role holds at once, at their longest."""
        return self.open_pack_tokens + (self.held_groups if self.overlap else 1) * self.max_prompt_tokens

    @property
    def open_pack_tokens(self) -> int:
        """Those of passes under way beside the group that is trained, where a role goes group by group: a pass of
        several prompts has two at least. Beside decode all groups count at their longest, which is more."""
        return 0 if self.overlap else (self.groups - 1) // 2 * min(self.prefix_pack_tokens, self.max_prompt_tokens)

    @property
    def kept_prefix_tokens(self) -> int:
        """Those of them whose prefix activations are held, on the device or the host; the others are recomputed."""
        if self.prefix_activations == "recompute":
            return 0
        tokens = self.held_prompt_tokens
        return tokens if self.prefix_kept_tokens is None else min(tokens, self.prefix_kept_tokens)

    @property
    def vision(self) -> VisionSource:
        """As `plan.vision.vision_source`."""
        if self.vision_of_rollout:
            return "rollout"
        runs_again = self.has_reference or self.prefix_activations == "recompute"
        return "trainer" if self.share_frozen_vision and self.freeze_vision and runs_again else "each"

    @property
    def held_features(self) -> int:
        """Groups whose shared vision features are held at once: from the prefill or the first prefix of a group to its
        prefix backward. Only role by role and without a reference that is one group."""
        if self.vision == "each":
            return 0
        alone = self.vision == "trainer" and not self.overlap and not self.has_reference and not self.prefix_pack_tokens
        return 1 if alone else self.groups

    @property
    def groups_per_replica(self) -> int:
        """Most groups that a rollout replica decodes."""
        return -(-self.groups * self.rollout_tp // self.train_tp)

    @property
    def suffix_rows(self) -> int:
        """Rows of the packed responses of one group at their longest."""
        return self.group_size * self.max_new_tokens

    @property
    def kept_layers(self) -> int:
        """`suffix_kept_layers` as a number of layers."""
        layers = self.shape.num_layers
        return layers if self.suffix_kept_layers is None else min(layers, self.suffix_kept_layers)

    @property
    def own_bytes(self) -> int:
        """Weights of a training shard."""
        return self.shape.shard_parameters(self.train_tp) * self.bytes_per_value

    @property
    def reference_bytes(self) -> int:
        """Weights of the reference; beside adapters it is the base, which lies there anyway."""
        return self.own_bytes if self.has_reference and not self.adapter_parameters else 0

    @property
    def trained_parameters(self) -> int:
        """Elements of a training shard that have a gradient."""
        if self.adapter_parameters:
            return self.adapter_parameters
        return sum(
            shard_count(group, self.train_tp, self.shape.num_kv_heads)
            for group in self.shape.groups()
            if not (self.freeze_vision and group.name.startswith("vision."))
        )

    @property
    def state_bytes(self) -> int:
        """Optimizer state of a rank: its data-parallel share of its training shard."""
        return -(-self.trained_parameters // self.data_parallel) * STATE_BYTES[self.master]
