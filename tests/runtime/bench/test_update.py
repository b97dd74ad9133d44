"""What a benchmark says of its updates."""

from __future__ import annotations

import pytest

from rollplex_cli.engines.trainer.adamw.link import LinkRates
from rollplex_cli.runtime.bench.update import summarize_updates


def test_median_seconds_and_bytes_without_a_link() -> None:
    rows = [
        {"optimizer": {"seconds": s, "to_device_bytes": 0, "to_host_bytes": 0, "exchanged_bytes": 8}} for s in (3, 1, 2)
    ]
    found = summarize_updates(rows)
    assert found["update_s_median"] == 2 and found["exchanged_bytes"] == 8
    assert found["link"] is found["ratio"] is None


def test_no_update_is_faster_than_any_direction_or_both() -> None:
    rates = LinkRates(to_device=50.0, to_host=40.0, both=80.0)
    assert rates.seconds(100, 100) == pytest.approx(2.5)
    assert rates.seconds(200, 100) == pytest.approx(4.0)
    assert rates.seconds(180, 170) == pytest.approx(350 / 80)
