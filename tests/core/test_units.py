from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.core.units import format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 * 1024**2, "1.5 GiB"), (-(1024**4), "-1.0 TiB")],
)
def test_bytes(value: int, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(("value", "text"), [(734_000, "734.0 k"), (8_292_166_656, "8.3 B"), (7, "7")])
def test_counts(value: int, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.346, "0.35 s"), (12.0, "12.0 s"), (185, "3 min 05 s"), (7620, "2 h 07 min"), (3599.7, "1 h 00 min")],
)
def test_seconds(value: float, text: str) -> None:
    assert format_seconds(value) == text


@settings(deadline=None)
@given(st.integers(min_value=0, max_value=2**60))
def test_printed_bytes_are_within_half_a_digit(value: int) -> None:
    number, unit = format_bytes(value).split()
    factor = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}[unit]
    assert abs(float(number) * factor - value) <= 0.051 * factor
