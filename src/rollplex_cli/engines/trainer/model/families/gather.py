"""The weights of a model of transformers as values of the forward; the family is picked by `model_type`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from rollplex_cli.core.errors import UsageError
from rollplex_cli.engines.trainer.model.families import qwen2_5_vl, qwen2_vl, qwen3_vl
from rollplex_cli.engines.trainer.model.families.parts import row, stacked
from rollplex_cli.engines.trainer.model.modules import HeadNorm
from rollplex_cli.engines.trainer.model.parallel import SINGLE, TensorParallel, VocabShard
from rollplex_cli.engines.trainer.model.parameters import DecoderWeights, ModelWeights, TextSizes
from rollplex_cli.plan.families import family_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollplex_cli.engines.lora.adapters import LoraSettings
    from rollplex_cli.engines.trainer.model.parameters import VisionSizes, VisionWeights


class FamilyModule(Protocol):
    """What a module of this folder offers."""

    VISION_ACTIVATION: str
    """The only `vision_config.hidden_act` it computes."""

    def check(self, config: Any, /) -> None:
        """Refuse a configuration of the family that is not computed, with a UsageError."""

    def mrope_axes(self, rope: Mapping[str, Any], /) -> tuple[int, ...]:
        """Axis of each rotary channel pair under the `rope_parameters`."""

    def vision(self, visual: Any, config: Any, /, parallel: TensorParallel) -> VisionWeights:
        """The weights of `model.visual` under a `vision_config`."""

    def vision_sizes(self, config: Any, degree: int) -> VisionSizes:
        """Sizes from `vision_config` on a rank of `degree`."""


MODULES: Mapping[str, FamilyModule] = {"qwen2_vl": qwen2_vl, "qwen2_5_vl": qwen2_5_vl, "qwen3_vl": qwen3_vl}


def model_weights(
    hf_model: Any, parallel: TensorParallel = SINGLE, vocab_start: int = 0, *, lora: LoraSettings | None = None
) -> ModelWeights:
    """Gather the weights of a `...ForConditionalGeneration` of a known family, or of a rank's shard of it.

    Call it after the parameters have reached their final memory: q/k/v and gate/up matrices that lie next to each
    other are multiplied in one go from then on. Raises UsageError for a configuration this forward does not compute.

    Args:
        parallel: the rank's place in its training group.
        vocab_start: token id of the first row of embedding and head.
        lora: settings of the adapters that the module has and the forward adds; None is the base without them.
    """
    config = hf_model.config
    family = MODULES[family_of({"model_type": config.model_type}).model_type]
    _check(config, family)
    text = hf_model.model.language_model
    return ModelWeights(
        embed=text.embed_tokens.weight,
        layers=tuple(_decoder(layer, config.text_config.rms_norm_eps, parallel, lora) for layer in text.layers),
        norm=text.norm.weight,
        head=hf_model.lm_head.weight,
        vision=family.vision(hf_model.model.visual, config.vision_config, parallel),
        text_sizes=_text_sizes(config.text_config, family, parallel.size),
        vision_sizes=family.vision_sizes(config.vision_config, parallel.size),
        vocab=VocabShard(vocab_start, text.embed_tokens.weight.shape[0]),
        parallel=parallel,
    )


def _decoder(layer: Any, eps: float, parallel: TensorParallel, lora: LoraSettings | None) -> DecoderWeights:
    attention, mlp = layer.self_attn, layer.mlp
    head_norms = {
        name: HeadNorm(getattr(attention, name).weight, eps)
        for name in ("q_norm", "k_norm")
        if hasattr(attention, name)
    }
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    return DecoderWeights(
        input_norm=layer.input_layernorm.weight,
        qkv=stacked(q, k, v, parallel=parallel, lora=lora),
        kv=stacked(k, v, parallel=parallel, lora=lora),
        output=row(attention.o_proj, parallel, lora),
        post_norm=layer.post_attention_layernorm.weight,
        gate_up=stacked(mlp.gate_proj, mlp.up_proj, parallel=parallel, lora=lora),
        down=row(mlp.down_proj, parallel, lora),
        **head_norms,
    )


def _text_sizes(config: Any, family: FamilyModule, degree: int) -> TextSizes:
    return TextSizes(
        num_heads=config.num_attention_heads // degree,
        num_kv_heads=max(1, config.num_key_value_heads // degree),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        norm_eps=config.rms_norm_eps,
        rope_theta=float(config.rope_parameters["rope_theta"]),
        mrope_axes=family.mrope_axes(config.rope_parameters),
    )


def _check(config: Any, family: FamilyModule) -> None:
    text, vision = config.text_config, config.vision_config
    rope = text.rope_parameters
    if rope.get("rope_type", "default") != "default":
        raise UsageError(f"the trainer computes default rotary positions only, not {rope['rope_type']!r}")
    if "mrope_section" not in rope:
        raise UsageError("the configuration has no `mrope_section`", hint="a vision-language model has one")
    if any(kind != "full_attention" for kind in getattr(text, "layer_types", None) or ()):
        raise UsageError("sliding-window attention cannot be trained", hint="set `use_sliding_window` to false")
    for name, act, known in (
        ("text", text.hidden_act, "silu"),
        ("vision", vision.hidden_act, family.VISION_ACTIVATION),
    ):
        if act != known:
            raise UsageError(f"the {name} MLP of a {config.model_type} must have the activation {known!r}, not {act!r}")
    family.check(config)
