"""The parameters and sizes of a Qwen2.5-VL module, gathered once so that the forward never walks the module tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import UsageError
from rollplex_cli.engines.trainer.model.parallel import SINGLE, TensorParallel, VocabShard
from rollplex_cli.engines.trainer.model.primitives import Linear, RowLinear, StackedLinear

if TYPE_CHECKING:
    import torch


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


@dataclass(frozen=True, slots=True)
class VisionBlockWeights:
    """One block of the vision tower. `qkv` is one matrix in the Hugging Face module, three in a shard of it."""

    norm1: torch.Tensor
    qkv: StackedLinear
    output: RowLinear
    norm2: torch.Tensor
    gate_up: StackedLinear
    down: RowLinear


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """The vision tower with its projector (`merger`)."""

    patch: torch.Tensor
    """[hidden, channels, temporal_patch, patch, patch], used as a [hidden, channels * ...] matrix."""
    blocks: tuple[VisionBlockWeights, ...]
    merger_norm: torch.Tensor
    merger_in: StackedLinear
    merger_out: RowLinear
    merged_width: int
    """Channels of the patches that are merged into one."""


@dataclass(frozen=True, slots=True)
class TextSizes:
    """What the decoder forward needs from the configuration; heads are those of this rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...]
    """Rotary channel pairs given to the temporal, row and column position; sums to head_dim / 2."""


@dataclass(frozen=True, slots=True)
class VisionSizes:
    """What the vision forward needs from the configuration; heads are those of this rank."""

    num_heads: int
    head_dim: int
    patch: int
    merge: int
    window: int
    """Side of an attention window in pixels."""
    full_attention_blocks: frozenset[int]


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


def model_weights(hf_model: Any, parallel: TensorParallel = SINGLE, vocab_start: int = 0) -> ModelWeights:
    """Gather the weights of a `Qwen2_5_VLForConditionalGeneration`, or of a rank's shard of it.

    Call it after the parameters have reached their final memory: q/k/v and gate/up matrices that lie next to each
    other are multiplied in one go from then on. Raises UsageError for a configuration this forward does not compute.

    Args:
        parallel: the rank's place in its training group.
        vocab_start: token id of the first row of embedding and head.
    """
    config = hf_model.config
    _check(config)
    text = hf_model.model.language_model
    return ModelWeights(
        embed=text.embed_tokens.weight,
        layers=tuple(_decoder(layer, parallel) for layer in text.layers),
        norm=text.norm.weight,
        head=hf_model.lm_head.weight,
        vision=_vision(hf_model.model.visual, parallel),
        text_sizes=_text_sizes(config.text_config, parallel.size),
        vision_sizes=_vision_sizes(config.vision_config, parallel.size),
        vocab=VocabShard(vocab_start, text.embed_tokens.weight.shape[0]),
        parallel=parallel,
    )


def _linear(module: Any) -> Linear:
    return Linear(module.weight, module.bias)


def _row(module: Any, parallel: TensorParallel) -> RowLinear:
    return RowLinear(module.weight, module.bias, parallel)


def _decoder(layer: Any, parallel: TensorParallel) -> DecoderWeights:
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v = _linear(attention.q_proj), _linear(attention.k_proj), _linear(attention.v_proj)
    return DecoderWeights(
        input_norm=layer.input_layernorm.weight,
        qkv=StackedLinear.of(q, k, v, parallel=parallel),
        kv=StackedLinear.of(k, v, parallel=parallel),
        output=_row(attention.o_proj, parallel),
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=StackedLinear.of(_linear(mlp.gate_proj), _linear(mlp.up_proj), parallel=parallel),
        down=_row(mlp.down_proj, parallel),
    )


def _vision_qkv(module: Any, parallel: TensorParallel) -> StackedLinear:
    """One matrix, or a shard's three modules `0` to `2`."""
    parts = (
        [module] if getattr(module, "weight", None) is not None else [module.get_submodule(str(i)) for i in range(3)]
    )
    return StackedLinear.of(*(_linear(part) for part in parts), parallel=parallel)


def _vision(visual: Any, parallel: TensorParallel) -> VisionWeights:
    blocks = tuple(
        VisionBlockWeights(
            norm1=block.norm1.weight,
            qkv=_vision_qkv(block.attn.qkv, parallel),
            output=_row(block.attn.proj, parallel),
            norm2=block.norm2.weight,
            gate_up=StackedLinear.of(_linear(block.mlp.gate_proj), _linear(block.mlp.up_proj), parallel=parallel),
            down=_row(block.mlp.down_proj, parallel),
        )
        for block in visual.blocks
    )
    merger = visual.merger
    return VisionWeights(
        patch=visual.patch_embed.proj.weight,
        blocks=blocks,
        merger_norm=merger.ln_q.weight,
        merger_in=StackedLinear.of(_linear(merger.mlp[0]), parallel=parallel),
        merger_out=_row(merger.mlp[2], parallel),
        merged_width=merger.mlp[0].weight.shape[1],
    )


def _text_sizes(config: Any, degree: int) -> TextSizes:
    return TextSizes(
        num_heads=config.num_attention_heads // degree,
        num_kv_heads=max(1, config.num_key_value_heads // degree),
        head_dim=config.hidden_size // config.num_attention_heads,
        norm_eps=config.rms_norm_eps,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        mrope_section=tuple(config.rope_parameters["mrope_section"]),
    )


def _vision_sizes(config: Any, degree: int) -> VisionSizes:
    return VisionSizes(
        num_heads=config.num_heads // degree,
        head_dim=config.hidden_size // config.num_heads,
        patch=config.patch_size,
        merge=config.spatial_merge_size,
        window=config.window_size,
        full_attention_blocks=frozenset(config.fullatt_block_indexes),
    )


def _check(config: Any) -> None:
    text, vision = config.text_config, config.vision_config
    rope = text.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise UsageError(f"the trainer computes default rotary positions only, not {rope['rope_type']!r}")
    if "mrope_section" not in rope:
        raise UsageError("the configuration has no `mrope_section`", hint="only Qwen2.5-VL models can be trained")
    if any(kind != "full_attention" for kind in text.layer_types):
        raise UsageError("sliding-window attention cannot be trained", hint="set `use_sliding_window` to false")
    for name, act in (("text", text.hidden_act), ("vision", vision.hidden_act)):
        if act != "silu":
            raise UsageError(f"the {name} MLP has an activation that cannot be trained: {act!r}")
