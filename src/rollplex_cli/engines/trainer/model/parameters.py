"""The parameters and sizes of a Qwen2.5-VL module, gathered once so that the forward never walks the module tree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import UsageError
from rollplex_cli.engines.trainer.model.primitives import Linear, StackedLinear

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """One decoder layer."""

    input_norm: torch.Tensor
    qkv: StackedLinear
    kv: StackedLinear
    output: Linear
    post_norm: torch.Tensor
    gate_up: StackedLinear
    down: Linear


@dataclass(frozen=True, slots=True)
class VisionBlockWeights:
    """One block of the vision tower. `qkv` is one matrix in the Hugging Face module."""

    norm1: torch.Tensor
    qkv: Linear
    output: Linear
    norm2: torch.Tensor
    gate_up: StackedLinear
    down: Linear


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """The vision tower with its projector (`merger`)."""

    patch: torch.Tensor
    """[hidden, channels, temporal_patch, patch, patch], used as a [hidden, channels * ...] matrix."""
    blocks: tuple[VisionBlockWeights, ...]
    merger_norm: torch.Tensor
    merger_in: Linear
    merger_out: Linear


@dataclass(frozen=True, slots=True)
class TextSizes:
    """What the decoder forward needs from the configuration."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    mrope_section: tuple[int, ...]
    """Rotary channel pairs given to the temporal, row and column position; sums to head_dim / 2."""


@dataclass(frozen=True, slots=True)
class VisionSizes:
    """What the vision forward needs from the configuration."""

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
    """[vocab, hidden]; the same object as `embed` where the two are tied."""
    vision: VisionWeights
    text_sizes: TextSizes
    vision_sizes: VisionSizes

    @property
    def dtype(self) -> torch.dtype:
        """Type of parameters and activations."""
        return self.norm.dtype

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.norm.device


def model_weights(hf_model: Any) -> ModelWeights:
    """Gather the weights of a `Qwen2_5_VLForConditionalGeneration`.

    Call it after the parameters have reached their final memory: q/k/v and gate/up matrices that lie next to each
    other are multiplied in one go from then on. Raises UsageError for a configuration this forward does not compute.
    """
    config = hf_model.config
    _check(config)
    text = hf_model.model.language_model
    return ModelWeights(
        embed=text.embed_tokens.weight,
        layers=tuple(_decoder(layer) for layer in text.layers),
        norm=text.norm.weight,
        head=hf_model.lm_head.weight,
        vision=_vision(hf_model.model.visual),
        text_sizes=_text_sizes(config.text_config),
        vision_sizes=_vision_sizes(config.vision_config),
    )


def _linear(module: Any) -> Linear:
    return Linear(module.weight, module.bias)


def _decoder(layer: Any) -> DecoderWeights:
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v = _linear(attention.q_proj), _linear(attention.k_proj), _linear(attention.v_proj)
    return DecoderWeights(
        input_norm=layer.input_layernorm.weight,
        qkv=StackedLinear.of(q, k, v),
        kv=StackedLinear.of(k, v),
        output=_linear(attention.o_proj),
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=StackedLinear.of(_linear(mlp.gate_proj), _linear(mlp.up_proj)),
        down=_linear(mlp.down_proj),
    )


def _vision(visual: Any) -> VisionWeights:
    blocks = tuple(
        VisionBlockWeights(
            norm1=block.norm1.weight,
            qkv=_linear(block.attn.qkv),
            output=_linear(block.attn.proj),
            norm2=block.norm2.weight,
            gate_up=StackedLinear.of(_linear(block.mlp.gate_proj), _linear(block.mlp.up_proj)),
            down=_linear(block.mlp.down_proj),
        )
        for block in visual.blocks
    )
    merger = visual.merger
    return VisionWeights(
        patch=visual.patch_embed.proj.weight,
        blocks=blocks,
        merger_norm=merger.ln_q.weight,
        merger_in=_linear(merger.mlp[0]),
        merger_out=_linear(merger.mlp[2]),
    )


def _text_sizes(config: Any) -> TextSizes:
    return TextSizes(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        norm_eps=config.rms_norm_eps,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        mrope_section=tuple(config.rope_parameters["mrope_section"]),
    )


def _vision_sizes(config: Any) -> VisionSizes:
    return VisionSizes(
        num_heads=config.num_heads,
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
