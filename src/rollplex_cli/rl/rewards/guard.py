"""The rule of the bundled tasks, and the guard around any reward function."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollplex_cli.core.errors import RewardError
from rollplex_cli.rl.rewards.text import tagged_answers

EXACT_WEIGHT = 0.9
FORMAT_WEIGHT = 0.1
MAX_REWARD = 1e9
"""Larger ones would leave sums of squares and float32 advantages without digits, and infinite in the end."""

RewardFunction = Callable[[Any, str, bool], "Mapping[str, float] | float"]
"""(sample, decoded response, ended by itself) to a number, or to named parts of which the reward is the sum."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """The reward of one response; all numbers are finite."""

    total: float
    parts: dict[str, float]
    """Named summands of `total`; a function that returns a bare number has the one part `reward`."""


def exact_answer_parts(text: str, answer: str, finished: bool) -> dict[str, float]:
    """0.9 for the right answer and 0.1 for the form, both on decoded text.

    The form holds when the whole response is `<answer>...</answer>` and it ended by the end token; blanks around
    count as form errors. The answer is right when the first `<answer>...</answer>` holds `answer`, blanks and
    upper case aside.
    """
    found = tagged_answers(text)
    exact = bool(found) and found[0].strip().lower() == answer.strip().lower()
    whole = bool(found) and text.startswith("<answer>") and text.endswith("</answer>") and text.count("<answer>") == 1
    return {"exact": EXACT_WEIGHT * exact, "format": FORMAT_WEIGHT * (whole and finished)}


def score(function: RewardFunction, sample: Any, text: str, finished: bool) -> RewardResult:
    """Call a task's reward function and check what it returns.

    Args:
        function: see `RewardFunction`.
        sample: passed through; its `sample_id` appears in errors.
        text: the decoded response without special tokens; any text a model can produce.
        finished: the response ended by the end token, not by its length or an abort.

    Raises:
        RewardError: the function raised, or returned something that is not a finite number.
    """
    where = place(_name(function), sample)
    try:
        value = function(sample, text, finished)
    except (Exception, SystemExit) as error:
        raise RewardError(f"{where} raised {type(error).__name__}: {error}") from error
    return checked(value, where)


def place(name: str, sample: Any) -> str:
    """How messages call one use of a reward function."""
    return f"reward function `{name}` of sample `{getattr(sample, 'sample_id', '?')}`"


def checked(value: Any, where: str) -> RewardResult:
    """What a reward function returned, as a result.

    Raises:
        RewardError: it is not a finite number, nor named parts that are.
    """
    parts = value if isinstance(value, Mapping) else {"reward": value}
    if not parts:
        raise RewardError(f"{where} returned no parts: {value!r}")
    numbers = {str(name): _number(part, f"{where}, part `{name}`,") for name, part in parts.items()}
    return RewardResult(total=math.fsum(numbers.values()), parts=numbers)


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def _number(value: Any, where: str) -> float:
    """A plain float. NumPy and PyTorch scalars count as numbers, truth values as 0 and 1; text is misuse."""
    if isinstance(value, str | bytes):
        raise RewardError(f"{where} returned text, not a number: {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise RewardError(f"{where} returned something that is not a number: {value!r}") from None
    if not math.isfinite(number):
        raise RewardError(f"{where} returned a number that is not finite: {number}")
    if abs(number) > MAX_REWARD:
        raise RewardError(f"{where} returned a number beyond {MAX_REWARD:g}: {number:g}")
    return number
