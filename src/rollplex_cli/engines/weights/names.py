"""Where each Hugging Face parameter lives inside the rollout engine's tensors.

The engine stacks what it multiplies together: q, k and v rows in `qkv_proj`, gate and up rows in `gate_up_proj`.
Everything else is stored whole under a shorter name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# (pattern of a Hugging Face parameter, name in the rollout engine, position in the stack or None).
_TEXT = r"model\.language_model\.layers\.(\d+)\."
_VISION = r"model\.visual\.blocks\.(\d+)\."
_RULES: tuple[tuple[str, str, int | None], ...] = (
    (_TEXT + r"self_attn\.q_proj\.(weight|bias)", r"model.layers.\1.self_attn.qkv_proj.\2", 0),
    (_TEXT + r"self_attn\.k_proj\.(weight|bias)", r"model.layers.\1.self_attn.qkv_proj.\2", 1),
    (_TEXT + r"self_attn\.v_proj\.(weight|bias)", r"model.layers.\1.self_attn.qkv_proj.\2", 2),
    (_TEXT + r"mlp\.gate_proj\.weight", r"model.layers.\1.mlp.gate_up_proj.weight", 0),
    (_TEXT + r"mlp\.up_proj\.weight", r"model.layers.\1.mlp.gate_up_proj.weight", 1),
    (r"model\.language_model\.(.+)", r"model.\1", None),
    (_VISION + r"attn\.qkv\.(weight|bias)", r"visual.blocks.\1.attn.qkv_proj.\2", None),
    (_VISION + r"mlp\.gate_proj\.(weight|bias)", r"visual.blocks.\1.mlp.gate_up_proj.\2", 0),
    (_VISION + r"mlp\.up_proj\.(weight|bias)", r"visual.blocks.\1.mlp.gate_up_proj.\2", 1),
    (r"model\.visual\.(.+)", r"visual.\1", None),
    (r"lm_head\.weight", r"lm_head.weight", None),
)
_PADDED = re.compile(_VISION + r"mlp\.(?:(?:gate|up)_proj\.(?:weight|bias)|down_proj\.weight)")
_COMPILED = tuple((re.compile(pattern), target, part) for pattern, target, part in _RULES)

VOCAB_ROWS = frozenset({"model.embed_tokens.weight", "lm_head.weight"})
"""Rollout tensors whose rows may be padded beyond the vocabulary."""


@dataclass(frozen=True, slots=True)
class Location:
    """A rollout tensor and, for a stacked one, which block of its rows."""

    name: str
    part: int | None


def rollout_location(hf_name: str) -> Location:
    """Where `hf_name` lives in the rollout engine. Raises KeyError for a name that no rule covers."""
    for pattern, target, part in _COMPILED:
        match = pattern.fullmatch(hf_name)
        if match:
            return Location(match.expand(target), part)
    raise KeyError(hf_name)


def is_padded_vision_mlp(hf_name: str) -> bool:
    """Whether the parameter's width is the padded one of the vision MLPs."""
    return _PADDED.fullmatch(hf_name) is not None
