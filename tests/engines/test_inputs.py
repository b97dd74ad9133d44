"""Reading the media side of a model configuration."""

from __future__ import annotations

import pytest

from rollplex_cli.core.errors import UsageError
from rollplex_cli.engines.inputs import MediaTokens
from rollplex_cli.plan.families import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_are_those_of_transformers(family: str) -> None:
    import transformers

    full = getattr(transformers, FAMILIES[family].config_class)().to_dict()
    tokens = MediaTokens.from_config({"model_type": family, "vision_config": {}})
    assert tokens == MediaTokens.from_config(full)
    assert (tokens.tokens_per_second is None) == (family != "qwen2_5_vl")


def test_values_of_the_file_win() -> None:
    tokens = MediaTokens.from_config(
        {
            "model_type": "qwen2_5_vl",
            "image_token_id": 1,
            "video_token_id": 2,
            "vision_start_token_id": 3,
            "vision_config": {"tokens_per_second": 2},
        }
    )
    assert tokens.tokens_per_second == 2
    assert (tokens.image_token_id, tokens.video_token_id, tokens.vision_start_token_id) == (1, 2, 3)
    assert tokens.merge_size == 2


def test_other_models_are_refused() -> None:
    with pytest.raises(UsageError, match="no vision configuration: llama"):
        MediaTokens.from_config({"model_type": "llama"})
    with pytest.raises(UsageError, match="`tokens_per_second` is not a number: 'two'"):
        MediaTokens.from_config({"model_type": "qwen2_5_vl", "vision_config": {"tokens_per_second": "two"}})
    with pytest.raises(UsageError, match="expected `model_type` to be .*: `llava`"):
        MediaTokens.from_config({"model_type": "llava", "vision_config": {}})
