"""A written checkpoint loads bit-equal and carries its companions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from rollplex_cli.core.errors import UsageError
from rollplex_cli.engines.weights.export import save_hf
from rollplex_cli.engines.weights.skeleton import build_skeleton, load_config, load_model, padded_vision_width


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_export_round_trip_is_bit_equal(tiny: Any, tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    source = tmp_path / "source"
    original = tiny.model(dtype, tied=tied, seed=1)
    original.save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    changed = tiny.model(dtype, tied=tied, seed=2)
    save_hf(changed, tmp_path / "out" / "step-3", source)
    loaded = load_model(tmp_path / "out" / "step-3", dtype)
    for (name, param), (other, expected) in zip(loaded.named_parameters(), changed.named_parameters(), strict=True):
        assert name == other
        assert param.dtype == dtype and torch.equal(param, expected), name
    assert (tmp_path / "out" / "step-3" / "tokenizer.json").read_text() == "{}"
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["step-3"]


def test_export_uses_published_names_and_drops_padding(tiny: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    tiny.model(intermediate=190, seed=1).save_pretrained(source)
    assert [padded_vision_width(width, 8) for width in (190, 192, 3420)] == [192, 192, 3424]
    padded = tiny.model(intermediate=192, seed=2)
    save_hf(padded, tmp_path / "out", source)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert "model.layers.0.self_attn.q_proj.weight" in names and "visual.blocks.1.attn.qkv.bias" in names
    assert not any("language_model" in name for name in names) and "lm_head.weight" not in names
    assert json.loads((tmp_path / "out" / "config.json").read_text())["vision_config"]["intermediate_size"] == 190
    loaded = load_model(tmp_path / "out", torch.float32).model.visual.blocks[0].mlp
    mine = padded.model.visual.blocks[0].mlp
    assert torch.equal(loaded.gate_proj.weight, mine.gate_proj.weight[:190])
    assert torch.equal(loaded.up_proj.bias, mine.up_proj.bias[:190])
    assert torch.equal(loaded.down_proj.weight, mine.down_proj.weight[:, :190])


def test_export_never_overwrites_and_leaves_nothing_behind(tiny: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    model = tiny.model()
    model.save_pretrained(source)
    with pytest.raises(UsageError, match="exists already"):
        save_hf(model, source, source)
    (source / "vocab.json").mkdir()
    (source / "zz.json").symlink_to(source / "missing")
    save_hf(model, tmp_path / "out", source)
    assert not (tmp_path / "out" / "vocab.json").exists()
    assert not (tmp_path / "out" / "zz.json").exists()


def test_skeleton_has_no_weights_and_draws_no_random_numbers(tiny: Any) -> None:
    state = torch.get_rng_state()
    config = tiny.config(intermediate=190)
    skeleton = build_skeleton(config, torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(param.is_meta and param.dtype == torch.bfloat16 for param in skeleton.parameters())
    assert not any(buffer.is_meta for buffer in skeleton.buffers())
    assert skeleton.model.visual.blocks[0].mlp.gate_proj.weight.shape == (192, 64)
    assert config.vision_config.intermediate_size == 190
    assert skeleton.lm_head.weight is skeleton.model.language_model.embed_tokens.weight


def test_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UsageError, match="gpt2"):
        load_config(tmp_path)
