"""Qwen2-VL (arXiv 2409.12191): LayerNorm and MLPs of two layers in the vision tower, attention within whole frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex_cli.engines.trainer.model.families.parts import (
    check,
    layer_norm,
    merger,
    mrope_axes,
    row,
    stacked,
    vision_qkv,
)
from rollplex_cli.engines.trainer.model.modules import PlainMlp, quick_gelu
from rollplex_cli.engines.trainer.model.parameters import VisionBlockWeights, VisionSizes, VisionWeights

if TYPE_CHECKING:
    from rollplex_cli.engines.trainer.model.parallel import TensorParallel

VISION_ACTIVATION = "quick_gelu"

__all__ = ["VISION_ACTIVATION", "check", "mrope_axes", "vision", "vision_sizes"]


def vision(visual: Any, _config: Any, parallel: TensorParallel) -> VisionWeights:
    """The weights of `model.visual`."""
    blocks = tuple(
        VisionBlockWeights(
            norm1=layer_norm(block.norm1),
            qkv=vision_qkv(block.attn.qkv, parallel),
            output=row(block.attn.proj, parallel),
            norm2=layer_norm(block.norm2),
            mlp=PlainMlp(stacked(block.mlp.fc1, parallel=parallel), row(block.mlp.fc2, parallel), quick_gelu),
        )
        for block in visual.blocks
    )
    merged = visual.merger
    return VisionWeights(
        patch=visual.patch_embed.proj.weight,
        blocks=blocks,
        merger=merger(layer_norm(merged.ln_q), merged.mlp[0], merged.mlp[2], parallel),
    )


def vision_sizes(config: Any, degree: int) -> VisionSizes:
    """Sizes from `vision_config` on a rank of `degree`."""
    return VisionSizes(
        num_heads=config.num_heads // degree,
        head_dim=config.embed_dim // config.num_heads,
        patch=config.patch_size,
        merge=config.spatial_merge_size,
        window=None,
        full_attention_blocks=frozenset(),
    )
