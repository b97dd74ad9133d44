"""The parameters and sizes of a model, gathered once (`families/`) so that the forward never walks the module tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rollplex_cli.engines.trainer.model.parallel import SINGLE, TensorParallel, VocabShard

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from rollplex_cli.engines.trainer.model.linear import RowLinear, StackedLinear
    from rollplex_cli.engines.trainer.model.modules import GatedMlp, HeadNorm, Merger, Norm, PlainMlp, PositionTable


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """One decoder layer."""

    input_norm: torch.Tensor
    qkv: StackedLinear
    kv: StackedLinear
    output: RowLinear
    post_norm: torch.Tensor
    gate_up: StackedLinear
    down: RowLinear
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None


@dataclass(frozen=True, slots=True)
class VisionBlockWeights:
    """One block of the vision tower. `qkv` is one matrix in the Hugging Face module, three in a shard of it."""

    norm1: Norm
    qkv: StackedLinear
    output: RowLinear
    norm2: Norm
    mlp: GatedMlp | PlainMlp


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """The vision tower with its projector (`merger`)."""

    patch: torch.Tensor
    """[hidden, channels, temporal_patch, patch, patch], used as a [hidden, channels * ...] matrix."""
    blocks: tuple[VisionBlockWeights, ...]
    merger: Merger
    patch_bias: torch.Tensor | None = None
    positions: PositionTable | None = None
    """Added to the patches, interpolated to their grid."""
    deepstack: Mapping[int, Merger] = field(default_factory=dict)
    """Projectors behind blocks in between: what the n-th yields is added behind decoder layer n."""


@dataclass(frozen=True, slots=True)
class TextSizes:
    """What the decoder forward needs from the configuration; heads are those of this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    mrope_axes: tuple[int, ...]
    """Which position turns each of the head_dim / 2 channel pairs: 0 temporal, 1 row, 2 column."""


@dataclass(frozen=True, slots=True)
class VisionSizes:
    """What the vision forward needs from the configuration; heads are those of this rank."""

    num_heads: int
    head_dim: int
    patch: int
    merge: int
    window: int | None
    """Side of an attention window in pixels; None where every block attends within whole frames."""
    full_attention_blocks: frozenset[int]
    """Blocks that attend within whole frames in spite of `window`."""
    table_side: int | None = None
    """Rows and columns of the learned table of positions, where there is one."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """The whole model: the module's own `Parameter` objects, so re-pointing their data needs no rebuild
    as long as fused neighbours stay neighbours."""

    embed: torch.Tensor
    layers: tuple[DecoderWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor
    """[vocab of this rank, hidden]; the same object as `embed` where the two are tied."""
    vision: VisionWeights
    text_sizes: TextSizes
    vision_sizes: VisionSizes
    vocab: VocabShard
    parallel: TensorParallel = SINGLE

    @property
    def dtype(self) -> torch.dtype:
        """Type of parameters and activations."""
        return self.norm.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.norm.device
