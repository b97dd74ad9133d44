"""Where each Hugging Face parameter lives inside the rollout engine's tensors, and how tensor parallelism cuts it.

The engine stacks what it multiplies together: q, k and v rows in `qkv_proj`, gate and up rows in `gate_up_proj`.
Everything else is stored whole under a shorter name. The families differ in which of these parameters they have, not
in where they keep them, so one table serves all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Split = Literal["rows", "kv_rows", "vocab", "columns", "replicated"]
"""By output rows, by key/value heads (rows, never below one head), by rows of the padded vocabulary (or another table
that the engine pads like it), by input columns, or not at all."""

_TEXT = r"model\.language_model\.layers\.(\d+)\."
_VISION = r"model\.visual\.blocks\.(\d+)\."
_MERGERS = r"model\.visual\.(merger|deepstack_merger_list\.\d+)\."
_LAYER, _BLOCK, _ATTENTION = r"model.layers.\1.", r"visual.blocks.\1.", r"model.layers.\1.self_attn."
# (pattern of a trainer parameter, name in the rollout engine, position in the stack or None, split).
_RULES: tuple[tuple[str, str, int | None, Split], ...] = (
    (_TEXT + r"self_attn\.q_proj\.(weight|bias)", _ATTENTION + r"qkv_proj.\2", 0, "rows"),
    (_TEXT + r"self_attn\.k_proj\.(weight|bias)", _ATTENTION + r"qkv_proj.\2", 1, "kv_rows"),
    (_TEXT + r"self_attn\.v_proj\.(weight|bias)", _ATTENTION + r"qkv_proj.\2", 2, "kv_rows"),
    (_TEXT + r"self_attn\.o_proj\.weight", _ATTENTION + "o_proj.weight", None, "columns"),
    (_TEXT + r"self_attn\.(q_norm|k_norm)\.weight", _ATTENTION + r"\2.weight", None, "replicated"),
    (_TEXT + r"mlp\.gate_proj\.weight", _LAYER + "mlp.gate_up_proj.weight", 0, "rows"),
    (_TEXT + r"mlp\.up_proj\.weight", _LAYER + "mlp.gate_up_proj.weight", 1, "rows"),
    (_TEXT + r"mlp\.down_proj\.weight", _LAYER + "mlp.down_proj.weight", None, "columns"),
    (_TEXT + r"(input_layernorm|post_attention_layernorm)\.weight", _LAYER + r"\2.weight", None, "replicated"),
    (r"model\.language_model\.norm\.weight", "model.norm.weight", None, "replicated"),
    (r"model\.language_model\.embed_tokens\.weight", "model.embed_tokens.weight", None, "vocab"),
    (r"lm_head\.weight", "lm_head.weight", None, "vocab"),
    (_VISION + r"attn\.qkv\.(weight|bias)", _BLOCK + r"attn.qkv_proj.\2", None, "rows"),
    *(
        (_VISION + rf"attn\.qkv\.{part}\.(weight|bias)", _BLOCK + r"attn.qkv_proj.\2", part, "rows")
        for part in range(3)
    ),
    (_VISION + r"attn\.proj\.weight", _BLOCK + "attn.proj.weight", None, "columns"),
    (_VISION + r"attn\.proj\.bias", _BLOCK + "attn.proj.bias", None, "replicated"),
    (_VISION + r"mlp\.gate_proj\.(weight|bias)", _BLOCK + r"mlp.gate_up_proj.\2", 0, "rows"),
    (_VISION + r"mlp\.up_proj\.(weight|bias)", _BLOCK + r"mlp.gate_up_proj.\2", 1, "rows"),
    (_VISION + r"mlp\.down_proj\.weight", _BLOCK + "mlp.down_proj.weight", None, "columns"),
    (_VISION + r"mlp\.down_proj\.bias", _BLOCK + "mlp.down_proj.bias", None, "replicated"),
    # The vision MLPs without a gate.
    (_VISION + r"mlp\.(fc1|linear_fc1)\.(weight|bias)", _BLOCK + r"mlp.\2.\3", None, "rows"),
    (_VISION + r"mlp\.(fc2|linear_fc2)\.weight", _BLOCK + r"mlp.\2.weight", None, "columns"),
    (_VISION + r"mlp\.(fc2|linear_fc2)\.bias", _BLOCK + r"mlp.\2.bias", None, "replicated"),
    (_VISION + r"(norm1|norm2)\.(weight|bias)", _BLOCK + r"\2.\3", None, "replicated"),
    (r"model\.visual\.patch_embed\.proj\.(weight|bias)", r"visual.patch_embed.proj.\1", None, "replicated"),
    (r"model\.visual\.merger\.ln_q\.(weight|bias)", r"visual.merger.ln_q.\1", None, "replicated"),
    (r"model\.visual\.merger\.mlp\.0\.(weight|bias)", r"visual.merger.mlp.0.\1", None, "rows"),
    (r"model\.visual\.merger\.mlp\.2\.weight", "visual.merger.mlp.2.weight", None, "columns"),
    (r"model\.visual\.merger\.mlp\.2\.bias", "visual.merger.mlp.2.bias", None, "replicated"),
    # Qwen3-VL: a learned table of positions, and one projector more for each block whose output is set aside.
    (r"model\.visual\.pos_embed\.weight", "visual.pos_embed.weight", None, "vocab"),
    (_MERGERS + r"norm\.(weight|bias)", r"visual.\1.norm.\2", None, "replicated"),
    (_MERGERS + r"linear_fc1\.(weight|bias)", r"visual.\1.linear_fc1.\2", None, "rows"),
    (_MERGERS + r"linear_fc2\.weight", r"visual.\1.linear_fc2.weight", None, "columns"),
    (_MERGERS + r"linear_fc2\.bias", r"visual.\1.linear_fc2.bias", None, "replicated"),
)
# (block, module, fused module of the rollout engine, position in its stack or None, split of the module's weight).
_ADAPTED: tuple[tuple[str, str, str, int | None, Split], ...] = (
    ("self_attn", "q_proj", "qkv_proj", 0, "rows"),
    ("self_attn", "k_proj", "qkv_proj", 1, "kv_rows"),
    ("self_attn", "v_proj", "qkv_proj", 2, "kv_rows"),
    ("self_attn", "o_proj", "o_proj", None, "columns"),
    ("mlp", "gate_proj", "gate_up_proj", 0, "rows"),
    ("mlp", "up_proj", "gate_up_proj", 1, "rows"),
    ("mlp", "down_proj", "down_proj", None, "columns"),
)


def _adapter_rules() -> tuple[tuple[str, str, int | None, Split], ...]:
    """Rules of LoRA's factors: A [rank, in] is cut where the input is, B [out, rank] where the output is."""
    rules: list[tuple[str, str, int | None, Split]] = []
    for block, module, fused, part, split in _ADAPTED:
        cuts: tuple[tuple[str, Split], ...] = (
            ("A", "columns" if split == "columns" else "replicated"),
            ("B", "replicated" if split == "columns" else split),
        )
        for factor, cut in cuts:
            pattern = _TEXT + rf"{block}\.{module}\.lora_{factor}\.weight"
            rules.append((pattern, _LAYER + f"{block}.{fused}.lora_{factor}", part, cut))
    return tuple(rules)


_PADDED = re.compile(_VISION + r"mlp\.(?:(?:gate|up)_proj\.(?:weight|bias)|down_proj\.weight)")
_ADAPTER = re.compile(r".*\.lora_[AB]\.weight")
_QKV = re.compile(r"(" + _VISION + r"attn\.qkv)\.(?:([012])\.)?(weight|bias)")
_COMPILED = tuple(
    (re.compile(pattern), target, part, split) for pattern, target, part, split in (*_RULES, *_adapter_rules())
)

ADAPTED_MODULES: dict[str, tuple[str, str, int | None]] = {row[1]: (row[0], row[2], row[3]) for row in _ADAPTED}
"""Modules of a decoder layer that may have an adapter: block, fused module of the rollout engine, place in it."""
VISION_QKV_PARTS = 3
VOCAB_ROWS = frozenset({"model.embed_tokens.weight", "lm_head.weight", "visual.pos_embed.weight"})
"""Rollout tensors whose rows may be padded beyond the vocabulary, or beyond the table of positions."""


@dataclass(frozen=True, slots=True)
class Location:
    """A rollout tensor and, for a stacked one, which block of its rows."""

    name: str
    part: int | None
    split: Split


def rollout_location(hf_name: str) -> Location:
    """Where `hf_name` lives in the rollout engine. Raises KeyError for a name that no rule covers."""
    for pattern, target, part, split in _COMPILED:
        match = pattern.fullmatch(hf_name)
        if match:
            return Location(match.expand(target), part, split)
    raise KeyError(hf_name)


def is_padded_vision_mlp(hf_name: str) -> bool:
    """Whether the parameter's width is the padded one of the vision MLPs."""
    return _PADDED.fullmatch(hf_name) is not None


def is_adapter(hf_name: str) -> bool:
    """Whether the parameter is a factor of a LoRA adapter."""
    return _ADAPTER.fullmatch(hf_name) is not None


def is_head_norm(name: str) -> bool:
    """Whether a parameter is the weight of a norm over single heads of a decoder layer."""
    return name.endswith(("self_attn.q_norm.weight", "self_attn.k_norm.weight"))


def vision_qkv(name: str) -> tuple[str, int | None] | None:
    """(Hugging Face tensor, part or None for the whole) of a parameter of the vision tower's stacked q, k and v;
    None for any other. A sharded trainer holds the parts apart: `attn.qkv.0.weight` is the queries'."""
    match = _QKV.fullmatch(name)
    if match is None:
        return None
    part = match.group(3)
    return f"{match.group(1)}.{match.group(4)}", None if part is None else int(part)


def trainer_name(stored_name: str) -> str:
    """Name in the Hugging Face module of a tensor stored in a checkpoint, whichever generation of names it has."""
    if stored_name.startswith(("model.language_model.", "model.visual.", "lm_head.")):
        return stored_name
    if stored_name.startswith("visual."):
        return f"model.{stored_name}"
    if stored_name.startswith("model."):
        return f"model.language_model.{stored_name.removeprefix('model.')}"
    return stored_name
