"""Qwen2.5-VL (arXiv 2502.13923): RMS norm, gated MLPs and windows in the vision tower."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex_cli.engines.trainer.model.families.parts import (
    VISION_EPS,
    check,
    merger,
    mrope_axes,
    row,
    stacked,
    vision_qkv,
)
from rollplex_cli.engines.trainer.model.modules import GatedMlp, RmsNorm
from rollplex_cli.engines.trainer.model.parameters import VisionBlockWeights, VisionSizes, VisionWeights

if TYPE_CHECKING:
    from rollplex_cli.engines.trainer.model.parallel import TensorParallel

VISION_ACTIVATION = "silu"

__all__ = ["VISION_ACTIVATION", "check", "mrope_axes", "vision", "vision_sizes"]


def vision(visual: Any, _config: Any, parallel: TensorParallel) -> VisionWeights:
    """The weights of `model.visual`."""
    blocks = tuple(
        VisionBlockWeights(
            norm1=RmsNorm(block.norm1.weight, VISION_EPS),
            qkv=vision_qkv(block.attn.qkv, parallel),
            output=row(block.attn.proj, parallel),
            norm2=RmsNorm(block.norm2.weight, VISION_EPS),
            mlp=GatedMlp(
                stacked(block.mlp.gate_proj, block.mlp.up_proj, parallel=parallel), row(block.mlp.down_proj, parallel)
            ),
        )
        for block in visual.blocks
    )
    merged = visual.merger
    return VisionWeights(
        patch=visual.patch_embed.proj.weight,
        blocks=blocks,
        merger=merger(RmsNorm(merged.ln_q.weight, VISION_EPS), merged.mlp[0], merged.mlp[2], parallel),
    )


def vision_sizes(config: Any, degree: int) -> VisionSizes:
    """Sizes from `vision_config` on a rank of `degree`."""
    return VisionSizes(
        num_heads=config.num_heads // degree,
        head_dim=config.hidden_size // config.num_heads,
        patch=config.patch_size,
        merge=config.spatial_merge_size,
        window=config.window_size,
        full_attention_blocks=frozenset(config.fullatt_block_indexes),
    )
