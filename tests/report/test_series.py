from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex_cli.core.errors import UsageError
from rollplex_cli.report.series import (
    heldout_points,
    load_run,
    merge_rows,
    number,
    printable,
    reward_means,
    sparkline,
    target_reached,
    trailing_means,
)


def test_a_resumed_step_replaces_the_one_before() -> None:
    rows = merge_rows([{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}, {"step": 1, "loss": 3.0}, {"loss": 9.0}])
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 3.0), (2, 2.0)]


def test_rows_of_one_step_are_merged() -> None:
    rows = merge_rows([{"step": 0, "eval": {"heldout_accuracy": 0.5}}, {"step": 0, "reward_mean": 0.4}])
    assert heldout_points(rows) == [(0, 0.5)]
    assert reward_means(rows, 10) == [0.4]


@pytest.mark.parametrize("value", [None, True, "1", float("nan"), float("inf"), {"b": 1}])
def test_only_finite_numbers_are_numbers(value: object) -> None:
    assert number({"a": value}, "a") is None


def test_number_looks_into_dictionaries() -> None:
    assert number({"phase_s": {"LEARN": 2}}, "phase_s.LEARN") == 2.0
    assert number({"phase_s": 3}, "phase_s.LEARN") is None


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=40), st.integers(1, 12))
def test_trailing_mean_is_the_mean_of_the_last_window(values: list[float], window: int) -> None:
    means = trailing_means(values, window)
    assert len(means) == len(values)
    last = values[-window:]
    assert means[-1] == pytest.approx(sum(last) / len(last), abs=1e-9)
    assert means[0] == values[0]


def test_target_needs_a_whole_window() -> None:
    rows = [{"step": step, "reward_mean": 1.0} for step in range(9)]
    assert target_reached(rows, 0.9, 10) is False
    assert target_reached([*rows, {"step": 9, "reward_mean": 1.0}], 0.9, 10) is True
    assert target_reached(rows, None, 10) is None


def test_target_is_judged_on_the_last_window() -> None:
    rewards = [1.0] * 10 + [0.0] * 10
    rows = [{"step": step, "reward_mean": reward} for step, reward in enumerate(rewards)]
    assert target_reached(rows, 0.9, 10) is False


@given(st.lists(st.floats(-1e6, 1e6), max_size=60), st.integers(1, 40), st.booleans())
def test_sparkline_never_exceeds_its_width(values: list[float], width: int, unicode: bool) -> None:
    line = sparkline(values, width, unicode=unicode)
    assert len(line) == min(width, len(values))
    assert unicode or line.isascii()


def test_sparkline_shows_lowest_and_highest() -> None:
    assert sparkline([0.0, 1.0], 10, unicode=False) == "_@"


def test_printable_shows_escapes_instead_of_sending_them() -> None:
    assert printable("a\x1b[31mb\u202e\n") == "a\\x1b[31mb\\u202e\\n"


@given(st.text())
def test_printable_is_printable(text: str) -> None:
    assert printable(text).isprintable()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run folder"):
        load_run(tmp_path)
    with pytest.raises(UsageError, match="no run folder"):
        load_run(tmp_path / "missing")
