from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.resources import model_config_folder, model_config_names
from rollplex_cli.plan.model import load_shape, shape_from_config


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("tiny", 733_888),
        # As the published checkpoints count.
        ("qwen25vl3b", 3_754_622_976),
        ("qwen25vl7b", 8_292_166_656),
        ("qwen25vl32b", 33_452_718_336),
        ("qwen25vl72b", 73_410_777_344),
        ("qwen2vl7b", 8_291_375_616),
        ("qwen3vl4b", 4_437_815_808),
        ("qwen3vl8b", 8_767_123_696),
    ],
)
def test_parameter_counts(name: str, count: int) -> None:
    assert load_shape(name).num_parameters == count


@pytest.mark.scenario
@pytest.mark.parametrize("name", model_config_names())
def test_counts_equal_those_of_the_real_model(name: str) -> None:
    import torch

    from rollplex_cli.data.compat import ensure_torchvision

    ensure_torchvision()
    import transformers

    config = transformers.AutoConfig.from_pretrained(model_config_folder(name))
    with torch.device("meta"):
        model = getattr(transformers, load_shape(name).family.model_class)(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == load_shape(name).num_parameters


def test_flat_configurations_as_first_published_give_the_same_shape() -> None:
    folder = model_config_folder("qwen25vl7b")
    assert folder is not None
    nested = json.loads((folder / "config.json").read_text())
    flat = {**nested.pop("text_config"), **nested}
    flat["vision_config"]["in_chans"] = flat["vision_config"].pop("in_channels")
    assert shape_from_config("qwen25vl7b", flat, "config.json") == load_shape("qwen25vl7b")


def test_shards_of_one_rank_are_the_padded_whole_and_halves_add_up_but_for_replicas() -> None:
    shape = load_shape("qwen25vl7b")
    # 32 layers x 4 more rows of the padded vision MLP (3420 -> 3424): gate, up and down of 1280, two biases
    pad = 32 * 4 * (3 * 1280 + 2)
    assert shape.shard_parameters(1) == shape.num_parameters + pad
    replicated = sum(group.count for group in shape.groups() if group.split == "replicated")
    assert 2 * shape.shard_parameters(2) == shape.shard_parameters(1) + replicated


def test_what_a_configuration_leaves_out_is_the_default_of_its_family(tmp_path: Path) -> None:
    """As transformers writes one: a vision tower of the default sizes is empty, and so is the width of a head."""
    for name in ("qwen2vl7b", "qwen3vl8b"):
        folder = model_config_folder(name)
        assert folder is not None
        values = json.loads((folder / "config.json").read_text())
        values["vision_config"], values["text_config"] = {}, dict(values["text_config"])
        values["text_config"].pop("head_dim", None)
        assert shape_from_config(name, values, "config.json") == load_shape(name)


def test_more_ranks_than_key_value_heads_share_heads() -> None:
    shape = load_shape("qwen25vl7b")
    # 28 layers x (key, value) x one head x 128 x bfloat16
    assert shape.kv_bytes_per_token(8, 2) == shape.kv_bytes_per_token(4, 2) == 28 * 2 * 1 * 128 * 2
    assert shape.kv_bytes_per_token(1, 2) == 28 * 2 * 4 * 128 * 2


def test_unknown_configuration_lists_the_bundled_ones() -> None:
    with pytest.raises(UsageError, match="no such model configuration in `model.config`: `qwen`") as caught:
        load_shape("qwen")
    assert caught.value.hint is not None
    assert "`qwen25vl7b`" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot read the model configuration"),
        ("[]", "expected a JSON object"),
        ('{"model_type": "llama"}', "expected `model_type` to be `qwen2_vl`.* in .*: `llama`"),
        ('{"model_type": "qwen3_vl_moe"}', "expected `model_type` to be .*: `qwen3_vl_moe`"),
        ('{"model_type": "qwen2_5_vl"}', "missing from .*: `hidden_size`"),
    ],
)
def test_checkpoint_folders_that_cannot_be_planned(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=message):
        load_shape(str(tmp_path))
