"""The model families that can be trained, by `model_type`: what every layer of the program must know of them.

What a family computes stands elsewhere, in the module that computes it (`engines/trainer/model/families/`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rollplex_cli.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

VideoTime = Literal["seconds", "steps", "text"]
"""How a model learns when a frame is: by temporal positions in proportion to seconds, by one position per temporal
step, or by time stamps in the text before each step, whose frames then stand on their own."""
VisionMlp = Literal["gated", "quick_gelu", "gelu"]
"""silu(gate) * up and RMS norm, or LayerNorm and two layers around x * sigmoid(1.702 x) or the tanh form of GELU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture."""

    model_type: str
    """In `config.json`."""
    label: str
    config_class: str
    """In transformers."""
    model_class: str
    """In transformers and in the rollout engine."""
    processor_class: str
    """In transformers."""
    rollout_file: str
    """The rollout engine's module that holds the model."""
    video_time: VideoTime
    vision_pad: int
    """The rollout engine rounds the width of the vision MLPs up to a multiple of this."""
    vision_mlp: VisionMlp
    head_norms: bool = False
    """A norm of each head's queries and keys, in place of biases of their projections."""
    # Defaults of the configuration, which leaves out a value equal to one.
    patch_size: int
    head_dim: int | None = None
    vision_depth: int = 32
    vision_hidden_size: int | None = None
    vision_intermediate_size: int = 3420
    table_cells: int = 0
    """Learned positions of the vision tower."""
    deepstack: tuple[int, ...] = ()
    """Vision blocks whose output is added behind the first decoder layers."""


FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="qwen2_vl",
            label="Qwen2-VL",
            config_class="Qwen2VLConfig",
            model_class="Qwen2VLForConditionalGeneration",
            processor_class="Qwen2VLProcessor",
            rollout_file="qwen2_vl",
            video_time="steps",
            vision_pad=1,
            vision_mlp="quick_gelu",
            patch_size=14,
            vision_hidden_size=1280,
        ),
        Family(
            model_type="qwen2_5_vl",
            label="Qwen2.5-VL",
            config_class="Qwen2_5_VLConfig",
            model_class="Qwen2_5_VLForConditionalGeneration",
            processor_class="Qwen2_5_VLProcessor",
            rollout_file="qwen2_5_vl",
            video_time="seconds",
            vision_pad=8,
            vision_mlp="gated",
            patch_size=14,
        ),
        Family(
            model_type="qwen3_vl",
            label="Qwen3-VL",
            config_class="Qwen3VLConfig",
            model_class="Qwen3VLForConditionalGeneration",
            processor_class="Qwen3VLProcessor",
            rollout_file="qwen3_vl",
            video_time="text",
            vision_pad=1,
            vision_mlp="gelu",
            patch_size=16,
            head_norms=True,
            head_dim=128,
            vision_depth=27,
            vision_hidden_size=1152,
            vision_intermediate_size=4304,
            table_cells=2304,
            deepstack=(8, 16, 24),
        ),
    )
}
_MIXTURE = "_moe"


def family_of(config: Mapping[str, Any], where: str = "the model's configuration") -> Family:
    """The family of a parsed `config.json`.

    Raises:
        UsageError: no such family; the message has the value and those that are supported.
    """
    found = config.get("model_type")
    family = FAMILIES.get(str(found))
    if family is not None:
        return family
    *others, last = (f"`{known}`" for known in FAMILIES)
    labels = ", ".join(known.label for known in FAMILIES.values())
    dense = "; mixtures of experts are not supported" if str(found).endswith(_MIXTURE) else ""
    raise UsageError(
        f"expected `model_type` to be {', '.join(others)} or {last} in `{where}`: `{found}`",
        hint=f"models that can be trained: {labels} (dense){dense}",
    )
