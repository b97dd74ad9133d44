"""Qwen3-VL, dense (arXiv 2511.21631): the norm of each head's queries and keys, interleaved M-RoPE, a learned table of
positions in the vision tower, and features of its early blocks added behind the first decoder layers (DeepStack,
arXiv 2406.04334)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import UsageError
from rollplex_cli.engines.trainer.model.families.parts import layer_norm, merger, row, stacked, vision_qkv
from rollplex_cli.engines.trainer.model.modules import PlainMlp, PositionTable, tanh_gelu
from rollplex_cli.engines.trainer.model.parallel import VocabShard
from rollplex_cli.engines.trainer.model.parameters import VisionBlockWeights, VisionSizes, VisionWeights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollplex_cli.engines.trainer.model.modules import Merger
    from rollplex_cli.engines.trainer.model.parallel import TensorParallel

VISION_ACTIVATION = "gelu_pytorch_tanh"


def check(config: Any) -> None:
    """Refuse what the forward, here or in the rollout engine, does not compute."""
    text, vision = config.text_config, config.vision_config
    if text.attention_bias:
        raise UsageError(f"biases of the attention cannot be trained: `attention_bias` is {text.attention_bias}")
    interleaved = text.rope_parameters.get("mrope_interleaved")
    if interleaved is not True:
        raise UsageError(
            f"a {config.model_type} must have `mrope_interleaved` true in `rope_parameters`, not {interleaved!r}",
            hint="the rollout engine would compute other positions",
        )
    blocks = list(vision.deepstack_visual_indexes)
    if blocks != sorted(set(blocks)) or not all(0 <= block < vision.depth for block in blocks):
        raise UsageError(f"`deepstack_visual_indexes` must be ascending blocks of the tower, not {blocks}")
    side = round(vision.num_position_embeddings**0.5)
    if side**2 != vision.num_position_embeddings:
        raise UsageError(f"`num_position_embeddings` must be a square: {vision.num_position_embeddings}")


def mrope_axes(rope: Mapping[str, Any]) -> tuple[int, ...]:
    """Temporal, row and column position in turn, until the pairs of rows and columns are spent."""
    section = rope["mrope_section"]
    axes = [0] * sum(section)
    for axis in (1, 2):
        for pair in range(axis, min(3 * section[axis], len(axes)), 3):
            axes[pair] = axis
    return tuple(axes)


def vision(visual: Any, config: Any, parallel: TensorParallel) -> VisionWeights:
    """The weights of `model.visual`."""
    blocks = tuple(
        VisionBlockWeights(
            norm1=layer_norm(block.norm1),
            qkv=vision_qkv(block.attn.qkv, parallel),
            output=row(block.attn.proj, parallel),
            norm2=layer_norm(block.norm2),
            mlp=PlainMlp(
                stacked(block.mlp.linear_fc1, parallel=parallel), row(block.mlp.linear_fc2, parallel), tanh_gelu
            ),
        )
        for block in visual.blocks
    )
    table = visual.pos_embed.weight
    shard = VocabShard.of_rank(config.num_position_embeddings, parallel)
    assert shard.rows == len(table), "the table of positions is cut as the vocabulary is"
    mergers = [_merger(module, parallel, norm_merged=True) for module in visual.deepstack_merger_list]
    return VisionWeights(
        patch=visual.patch_embed.proj.weight,
        patch_bias=visual.patch_embed.proj.bias,
        positions=PositionTable(table, shard, parallel),
        blocks=blocks,
        merger=_merger(visual.merger, parallel, norm_merged=False),
        deepstack=dict(zip(config.deepstack_visual_indexes, mergers, strict=True)),
    )


def _merger(module: Any, parallel: TensorParallel, *, norm_merged: bool) -> Merger:
    return merger(layer_norm(module.norm), module.linear_fc1, module.linear_fc2, parallel, norm_merged=norm_merged)


def vision_sizes(config: Any, degree: int) -> VisionSizes:
    """Sizes from `vision_config` on a rank of `degree`."""
    return VisionSizes(
        num_heads=config.num_heads // degree,
        head_dim=config.hidden_size // config.num_heads,
        patch=config.patch_size,
        merge=config.spatial_merge_size,
        window=None,
        full_attention_blocks=frozenset(),
        table_side=round(config.num_position_embeddings**0.5),
    )
