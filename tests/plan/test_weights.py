"""How the trainer's weights lie in the rollout's copy."""

from __future__ import annotations

import pytest

from rollplex_cli.plan.model import load_shape
from rollplex_cli.plan.weights import STAGING_BYTES, weight_sharing

GIB = 2**30


def test_the_32b_model_at_8_over_4_beside_the_paper() -> None:
    shape = load_shape("qwen25vl32b")
    sharing = weight_sharing(shape, 8, 4, 2)
    # The paper: 60.0 % of identical order, 32.8 % transposed views, 7.2 % rebuilt.
    assert sharing.percent_of("view") == pytest.approx(32.8, abs=0.05)
    assert sharing.percent_of("identical") == pytest.approx(67.2, abs=0.05)
    assert sharing.bytes_of("rebuilt") == sharing.extra_bytes == 0
    assert sharing.second_copy_bytes / GIB == pytest.approx(7.8, abs=0.05)
    assert sharing.staging_bytes == STAGING_BYTES * 3 // 2 < 0.1 * GIB
    total = sum(sharing.bytes_of(kind) for kind in ("identical", "view", "rebuilt"))
    assert total == sharing.second_copy_bytes == shape.shard_parameters(8) * 2
    assert sharing.received_bytes == (shape.shard_parameters(4) - shape.shard_parameters(8)) * 2
    document = sharing.to_dict(shape)
    assert document["paper"]["extra_gib"] == 1.1
    assert weight_sharing(load_shape("qwen25vl7b"), 8, 4, 2).to_dict(load_shape("qwen25vl7b"))["paper"] is None


def test_equal_degrees_share_whole_tensors() -> None:
    sharing = weight_sharing(load_shape("qwen25vl7b"), 4, 4, 2)
    assert sharing.percent_of("identical") == 100.0
    assert sharing.received_bytes == sharing.staging_bytes == 0


def test_key_value_heads_are_never_cut_below_one() -> None:
    shape = load_shape("qwen25vl3b")  # two key/value heads
    rows = {row.name: row for row in weight_sharing(shape, 4, 2, 2).classes}
    assert rows["attention.kv"].received_bytes == 0
    assert rows["attention.q"].received_bytes == rows["attention.q"].shard_bytes
