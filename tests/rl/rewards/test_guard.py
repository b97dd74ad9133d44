"""The bundled reward rule and the guard around any reward function."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollplex_cli.core.errors import RewardError
from rollplex_cli.rl.rewards import exact_answer_parts, score

SAMPLE = SimpleNamespace(sample_id="train-00007", answer="left")


@pytest.mark.parametrize(
    ("text", "finished", "exact", "form"),
    [
        ("<answer>left</answer>", True, 0.9, 0.1),
        ("<answer>left</answer>", False, 0.9, 0.0),  # cut off before the end token
        ("<answer>right</answer>", True, 0.0, 0.1),
        ("<answer> Left </answer>", True, 0.9, 0.1),
        ("it is <answer>left</answer>", True, 0.9, 0.0),
        ("<answer>left</answer>!", True, 0.9, 0.0),
        ("<answer>left</answer><answer>left</answer>", True, 0.9, 0.0),
        ("<answer>right</answer><answer>left</answer>", True, 0.0, 0.0),  # the first answer counts
        ("<answer><answer>left</answer>", True, 0.0, 0.0),
        ("<answer>left right up down</answer>", True, 0.0, 0.1),
        ("left", True, 0.0, 0.0),
        ("<answer>left", True, 0.0, 0.0),
        ("[/answer] \x1b[31m", True, 0.0, 0.0),
        ("", True, 0.0, 0.0),
    ],
)
def test_exact_answer_parts(text: str, finished: bool, exact: float, form: float) -> None:
    assert exact_answer_parts(text, "left", finished) == {"exact": exact, "format": form}


@given(text=st.text(), finished=st.booleans())
def test_any_text_has_a_finite_reward(text: str, finished: bool) -> None:
    for response in (text, f"<answer>{text}</answer>", f"<answer>{text}"):
        result = score(lambda s, t, f: exact_answer_parts(t, s.answer, f), SAMPLE, response, finished)
        assert 0.0 <= result.total <= 1.0
        assert result.total == math.fsum(result.parts.values())


@pytest.mark.parametrize("value", [0.25, 1, np.float32(0.5), torch.tensor(0.5), {"a": 0.25, "b": np.int64(1)}])
def test_numbers_of_any_library_become_floats(value: Any) -> None:
    result = score(lambda *_: value, SAMPLE, "text", True)
    assert all(type(part) is float for part in result.parts.values())
    assert type(result.total) is float
    expected = sum(value.values()) if isinstance(value, dict) else value
    assert result.total == pytest.approx(float(expected))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "not a number: None"),
        ("0.5", "returned text"),
        (float("nan"), "not finite: nan"),
        (float("inf"), "not finite: inf"),
        ([0.5], "not a number"),
        (torch.ones(2), "not a number"),
        ({}, "no parts"),
        ({"exact": 0.5, "length": float("nan")}, "part `length`"),
        (10**400, "not a number"),
        (-1e10, r"beyond 1e\+09: -1e\+10"),
        ({"exact": 1e308, "length": 1e308}, "part `exact`, returned a number beyond"),
        (1j, "not a number"),
    ],
)
def test_what_is_no_number_is_refused(value: Any, message: str) -> None:
    def odd_reward(sample: Any, text: str, finished: bool) -> Any:
        return value

    with pytest.raises(RewardError, match=message) as caught:
        score(odd_reward, SAMPLE, "text", True)
    assert "odd_reward" in caught.value.message
    assert "train-00007" in caught.value.message


def test_an_exception_names_function_sample_and_itself() -> None:
    def failing_reward(sample: Any, text: str, finished: bool) -> float:
        raise KeyError("boxes")

    with pytest.raises(RewardError, match=r"failing_reward.*train-00007.*KeyError: 'boxes'") as caught:
        score(failing_reward, SAMPLE, "text", True)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.exit_code == 1
    with pytest.raises(RewardError, match="raised SystemExit: 3"):
        score(lambda *_: sys.exit(3), SAMPLE, "text", True)
