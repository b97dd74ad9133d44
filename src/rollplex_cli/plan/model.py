"""The shape of a model from its `config.json`: parameter counts, and bytes per token of its caches."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.resources import model_config_folder, model_config_names
from rollplex_cli.plan.families import family_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rollplex_cli.plan.families import Family

Split = Literal["rows", "kv_rows", "columns", "replicated"]
"""How tensor parallelism cuts a parameter: by output rows (vocabulary rows included), by key/value heads (rows,
but never below one head), by input columns, or not at all."""

VOCAB_PAD = 64
"""It pads the vocabulary to a multiple of this before it cuts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGroup:
    """Parameters of one role in all layers together."""

    name: str
    split: Split
    count: int
    """Elements, pad included."""
    matrices: int = 1
    """In how many matrices they lie; biases are not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes that memory and topology depend on."""

    name: str
    family: Family
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of one attention head of the language model."""
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    vision_depth: int
    vision_hidden_size: int
    vision_num_heads: int
    vision_intermediate_size: int
    vision_in_channels: int
    patch_size: int
    merge_size: int
    temporal_patch_size: int
    table_cells: int
    """Learned positions of the vision tower."""
    num_deepstack: int
    """Projectors beside the one behind the last block."""

    @property
    def vision_width(self) -> int:
        """Width of the vision MLP with its pad."""
        return -(-self.vision_intermediate_size // self.family.vision_pad) * self.family.vision_pad

    @property
    def patch_elements(self) -> int:
        """Pixel values of one patch."""
        return self.vision_in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def num_parameters(self) -> int:
        """Trainable elements, without pad and with tied embeddings counted once."""
        return sum(group.count for group in self.groups(padded=False))

    def groups(self, *, padded: bool = True) -> list[ParameterGroup]:
        """Every parameter, by role. `padded` rounds the vision MLP's width and the vocabulary up as the rollout engine
        does at every degree."""
        width = self.vision_width if padded else self.vision_intermediate_size
        vision = self._gated_vision_groups if self.family.vision_mlp == "gated" else self._plain_vision_groups
        return [*self._text_groups(VOCAB_PAD if padded else 1), *vision(width)]

    def shard_parameters(self, degree: int) -> int:
        """Elements that one rank of a tensor-parallel group holds, pad included."""
        return sum(shard_count(group, degree, self.num_kv_heads) for group in self.groups())

    def adapter_parameters(self, rank: int, targets: Sequence[str], degree: int) -> int:
        """Elements of LoRA adapters that one rank of a tensor-parallel group trains: per projection and layer A
        [rank, in] and B [out, rank], one of the two cut by the degree and the other whole."""
        h, m = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim // degree, max(1, self.num_kv_heads // degree) * self.head_dim
        # rank x (whole side + this rank's share of the cut side)
        sides = {
            "q_proj": h + q, "k_proj": h + kv, "v_proj": h + kv, "o_proj": q + h,
            "gate_proj": h + m // degree, "up_proj": h + m // degree, "down_proj": m // degree + h,
        }  # fmt: skip
        return self.num_layers * rank * sum(sides[target] for target in targets)

    def kv_bytes_per_token(self, degree: int, bytes_per_value: int) -> int:
        """Keys and values of one token on one rank of a tensor-parallel group."""
        heads = max(1, self.num_kv_heads // degree)
        # layers x (key, value) x heads of this rank x head width x bytes
        return self.num_layers * 2 * heads * self.head_dim * bytes_per_value

    def _text_groups(self, pad: int) -> list[ParameterGroup]:
        rows = -(-self.vocab_size // pad) * pad
        h, q, kv = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layers, bias = self.num_layers, not self.family.head_norms
        head_norms = 2 * self.head_dim if self.family.head_norms else 0
        head = [] if self.tied_embeddings else [_rows("lm_head", rows * h)]
        return [
            _rows("embed_tokens", rows * h),
            *head,
            _rows("attention.q", layers * (h * q + bias * q), layers),
            ParameterGroup(
                name="attention.kv", split="kv_rows", count=layers * 2 * (h * kv + bias * kv), matrices=2 * layers
            ),
            _columns("attention.o", layers * h * q),
            _rows("mlp.gate_up", layers * 2 * h * self.intermediate_size, 2 * layers),
            _columns("mlp.down", layers * h * self.intermediate_size),
            _replicated("norms", layers * (2 * h + head_norms) + h),
        ]

    def _gated_vision_groups(self, width: int) -> list[ParameterGroup]:
        v, depth = self.vision_hidden_size, self.vision_depth
        merged = self.merge_size**2 * v
        return [
            _replicated("vision.patch_embed", self.patch_elements * v),
            _rows("vision.qkv", depth * 3 * (v * v + v), 3 * depth),
            _columns("vision.proj", depth * v * v),
            _rows("vision.mlp.gate_up", depth * 2 * (v * width + width), 2 * depth),
            _columns("vision.mlp.down", depth * v * width),
            _rows("vision.merger.0", merged * merged + merged),
            _columns("vision.merger.2", merged * self.hidden_size),
            # Two norms, and the biases of proj and down; the merger's norm and its last bias.
            _replicated("vision.norms", depth * 4 * v + v + self.hidden_size),
        ]

    def _plain_vision_groups(self, width: int) -> list[ParameterGroup]:
        """LayerNorm and an MLP of two layers, in place of RMS norm and a gated MLP."""
        v, depth, extra = self.vision_hidden_size, self.vision_depth, self.num_deepstack
        merged = self.merge_size**2 * v
        table = [_rows("vision.positions", self.table_cells * v)] if self.table_cells else []
        return [
            _replicated("vision.patch_embed", self.patch_elements * v + (v if self.table_cells else 0)),
            *table,
            _rows("vision.qkv", depth * 3 * (v * v + v), 3 * depth),
            _columns("vision.proj", depth * v * v),
            _rows("vision.mlp.1", depth * (v * width + width), depth),
            _columns("vision.mlp.2", depth * v * width),
            _rows("vision.merger.0", (1 + extra) * (merged * merged + merged), 1 + extra),
            _columns("vision.merger.2", (1 + extra) * merged * self.hidden_size),
            # Two norms with biases, and the biases of proj and the MLP; the mergers' norms and last biases.
            _replicated("vision.norms", depth * 6 * v + 2 * v + extra * 2 * merged + (1 + extra) * self.hidden_size),
        ]


def shard_count(group: ParameterGroup, degree: int, num_kv_heads: int) -> int:
    """Elements of a group on one rank of `degree`."""
    if group.split == "replicated":
        return group.count
    ways = min(degree, num_kv_heads) if group.split == "kv_rows" else degree
    return -(-group.count // ways)


def load_shape(name: str) -> ModelShape:
    """The shape of a bundled configuration or of a checkpoint folder. The planner's only file access.

    Raises:
        UsageError: there is no such configuration, or it is of no known family.
    """
    folder = model_config_folder(name)
    if folder is None:
        bundled = ", ".join(f"`{known}`" for known in model_config_names())
        hint = f"bundled configurations are {bundled}; a checkpoint is a folder with `config.json`"
        raise UsageError(f"no such model configuration in `model.config`: `{name}`", hint=hint)
    path = folder / "config.json"
    return shape_from_config(name, _read(path), str(path))


def shape_from_config(name: str, config: dict[str, Any], where: str) -> ModelShape:
    """A shape from a parsed `config.json`, nested (`text_config`) or flat as published first."""
    family = family_of(config, where)
    text = config.get("text_config") or config
    vision = config.get("vision_config") or {}
    try:
        hidden, heads = text["hidden_size"], text["num_attention_heads"]
        return ModelShape(
            name=name,
            family=family,
            hidden_size=hidden,
            num_layers=text["num_hidden_layers"],
            num_heads=heads,
            num_kv_heads=text["num_key_value_heads"],
            head_dim=text.get("head_dim") or family.head_dim or hidden // heads,
            intermediate_size=text["intermediate_size"],
            vocab_size=text["vocab_size"],
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            vision_depth=vision.get("depth", family.vision_depth),
            vision_num_heads=vision.get("num_heads", 16),
            vision_in_channels=vision.get("in_channels", vision.get("in_chans", 3)),
            patch_size=vision.get("patch_size", family.patch_size),
            merge_size=vision.get("spatial_merge_size", 2),
            temporal_patch_size=vision.get("temporal_patch_size", 2),
            table_cells=vision.get("num_position_embeddings", family.table_cells) if family.table_cells else 0,
            num_deepstack=len(vision.get("deepstack_visual_indexes", family.deepstack)),
            **_vision_widths(family, vision),
        )
    except KeyError as error:
        raise UsageError(f"missing from `{where}`: `{error.args[0]}`") from error


def _vision_widths(family: Family, vision: dict[str, Any]) -> dict[str, int]:
    # The first of the families gives its width as `embed_dim`, because `hidden_size` is that of the language model.
    key = "embed_dim" if family.model_type == "qwen2_vl" else "hidden_size"
    width = vision[key] if family.vision_hidden_size is None else vision.get(key, family.vision_hidden_size)
    if key == "embed_dim":
        return {"vision_hidden_size": width, "vision_intermediate_size": width * vision.get("mlp_ratio", 4)}
    mlp = vision.get("intermediate_size", family.vision_intermediate_size)
    return {"vision_hidden_size": width, "vision_intermediate_size": mlp}


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the model configuration `{path}`: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"expected a JSON object in `{path}`")
    return config


def _rows(name: str, count: int, matrices: int = 1) -> ParameterGroup:
    return ParameterGroup(name=name, split="rows", count=count, matrices=matrices)


def _columns(name: str, count: int) -> ParameterGroup:
    return ParameterGroup(name=name, split="columns", count=count)


def _replicated(name: str, count: int) -> ParameterGroup:
    return ParameterGroup(name=name, split="replicated", count=count)
