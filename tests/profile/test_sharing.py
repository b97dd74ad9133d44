"""Sharing policies as a profile names them."""

from __future__ import annotations

import pytest

from rollplex_cli.core.errors import UsageError
from rollplex_cli.profile.load import load_profile
from rollplex_cli.profile.sharing import parse_policy


def test_every_policy_is_a_few_numbers() -> None:
    assert not parse_policy("serial").overlap
    assert parse_policy("streams").equal_priority and not parse_policy("priority").equal_priority
    assert parse_policy("fence:16").reserved_sms == 16
    assert parse_policy("partition:70/30").decode_percent == 70
    assert parse_policy("auto").measured and parse_policy("auto").reserved_sms == 32


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("mps", "MPS divides a GPU between processes"),
        ("mps:30", "one process here"),
        ("fence:0", "from 1 to 128 SMs"),
        ("fence:999", "from 1 to 128 SMs"),
        ("partition:70/40", "sum to 100"),
        ("partition:0/100", "expected"),
        ("fast", "expected one of: serial, streams, priority, auto, fence:R, partition:D/P"),
    ],
)
def test_others_are_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_policy(text)


def test_a_profile_tells_key_and_reason() -> None:
    with pytest.raises(UsageError, match=r"schedule\.policy: got `mps`, MPS divides"):
        load_profile("tiny", ["schedule.policy=mps"])
    with pytest.raises(UsageError, match="the rollout leaves keys and values, no activations"):
        load_profile("tiny", ["reuse.rollout_prefix=true"])
    with pytest.raises(UsageError, match="leaves the tower's output, no activations"):
        load_profile("tiny", ["reuse.vision=true"])
    assert load_profile("tiny", ["reuse.vision=true", "model.freeze_vision=true"]).reuse.vision
    with pytest.raises(UsageError, match=r"reuse\.vision: got `true`, expected `false` with `schedule.name: disagg`"):
        load_profile("tiny-2rank", ["reuse.vision=true", "model.freeze_vision=true", "schedule.name=disagg"])
