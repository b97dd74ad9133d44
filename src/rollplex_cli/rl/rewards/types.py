"""Built-in reward types: (sample, response text, ended by itself) to a number from 0 to 1.

Where a type exists in Video-R1 (its `accuracy_reward`), it follows that one, with these differences:

1. Two different answers in one response are no answer; there the first one counts.
2. `numerical` compares at the precision at which the true answer is written; there both are rounded to 2 decimals.
3. A percent sign counts: `50 %` is right for 50 %, 50 and 0.5.
4. `free_text` is the mean of the F1 of ROUGE-1, ROUGE-2 and ROUGE-L on lower-case words without stemming.
5. `ocr` counts words without their punctuation.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from functools import cache
from typing import TYPE_CHECKING, Protocol

from rapidfuzz.distance import LCSseq, Levenshtein

from rollplex_cli.rl.rewards.text import find_answer, option_letter, parse_number, truth, words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from rollplex_cli.rl.rewards.text import Number


class Row(Protocol):
    """What reward types read of a sample; `data.types.Sample` has it."""

    @property
    def sample_id(self) -> str:
        """Names the row in messages."""

    @property
    def answer(self) -> str:
        """The true answer."""

    @property
    def kind(self) -> str:
        """Kind of question; `auto` chooses by it."""

    @property
    def extra(self) -> Mapping[str, Any]:
        """Further columns of the row; `options` lists the texts of a multiple choice."""


MAX_FORMULA = 1000
"""Characters of a formula; of a response without tags as many are read, from its end."""
_FORMAT = re.compile(r"\s*(?:<think>.*?</think>\s*)?<answer>.*?</answer>\s*", re.DOTALL)
_THINK_FORMAT = re.compile(r"\s*<think>.*?</think>\s*<answer>.*?</answer>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def exact(row: Row, text: str, finished: bool) -> float:
    """1 where the answer is the true one, case and the amount of white space aside."""
    del finished
    answer = find_answer(text)
    return float(answer is not None and _folded(answer) == _folded(truth(row.answer)))


def multiple_choice(row: Row, text: str, finished: bool) -> float:
    """1 where the answer names the right option: by its letter (`B`, `(b)`, `B. a dog`) or by its whole text."""
    del finished
    answer = find_answer(text)
    if answer is None:
        return 0.0
    right, options = truth(row.answer), _options(row)
    return float(_letter(answer, options) == _letter(right, options) or _folded(answer) == _folded(right))


def numerical(row: Row, text: str, finished: bool) -> float:
    """1 where the answer is the true number, to half a unit of the last digit that the true answer writes.

    A true answer that is no number is compared as text.
    """
    del finished
    answer, right = find_answer(text), parse_number(truth(row.answer))
    if right is None:
        return exact(row, text, True)
    number = None if answer is None else parse_number(answer)
    return float(number is not None and any(_close(value, right) for value in _readings(number, right)))


def regression(row: Row, text: str, finished: bool) -> float:
    """1 minus the relative error of the answer, at least 0."""
    del finished
    answer, right = find_answer(text), parse_number(truth(row.answer))
    number = None if answer is None else parse_number(answer)
    if number is None or right is None:
        return 0.0
    error = min(abs(value - right.value) for value in _readings(number, right))
    return 1.0 - min(1.0, (error + 1e-9) / (abs(right.value) + 1e-9)) if error else 1.0


def ocr(row: Row, text: str, finished: bool) -> float:
    """1 minus the word error rate of the answer (edits over words of the true text), at least 0."""
    del finished
    answer, right = find_answer(text), words(truth(row.answer))
    if answer is None:
        return 0.0
    given = words(answer)
    if not right:
        return float(not given)
    return max(0.0, 1.0 - Levenshtein.distance(given, right) / len(right))


def free_text(row: Row, text: str, finished: bool) -> float:
    """Mean of the F1 of ROUGE-1, ROUGE-2 and ROUGE-L (Lin 2004)."""
    del finished
    answer, right = find_answer(text), words(truth(row.answer))
    if answer is None:
        return 0.0
    given = words(answer)
    grams = [_f1(_overlap(given, right, n), len(given) - n + 1, len(right) - n + 1) for n in (1, 2)]
    return (sum(grams) + _f1(LCSseq.similarity(given, right), len(given), len(right))) / 3


def answer_format(row: Row, text: str, finished: bool) -> float:
    """1 where the response is one `<answer>...</answer>`, a `<think>...</think>` before it allowed, and ended by
    itself."""
    del row
    return float(finished and _tags_once(text) and _FORMAT.fullmatch(text) is not None)


def think_format(row: Row, text: str, finished: bool) -> float:
    """1 where the response is `<think>...</think><answer>...</answer>` and ended by itself."""
    del row
    return float(finished and _tags_once(text) and _THINK_FORMAT.fullmatch(text) is not None)


@cache
def _quieten_math_verify() -> None:
    """A formula that takes too long is a wrong answer, and no news. Once a process: setting a level takes all loggers'
    lock."""
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)


def math_equal(row: Row, text: str, finished: bool) -> float:
    """1 where `math-verify` finds the answer equal to the true one; without tags the last formula or number counts.
    An answer of over MAX_FORMULA characters is wrong unread: parsing one takes seconds.

    Call it on the main thread of a process that may be killed: it bounds its own time by an alarm signal, which
    works nowhere else, and symbolic algebra knows no other bound.
    """
    del finished
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    _quieten_math_verify()
    answer = find_answer(text)
    if answer is not None and len(answer) > MAX_FORMULA:
        return 0.0
    try:
        right = parse(_as_formula(truth(row.answer)))
        given = parse(text[-MAX_FORMULA:] if answer is None else _as_formula(answer))
        return float(verify(right, given))
    except TimeoutException:
        return 0.0


def auto(row: Row, text: str, finished: bool) -> float:
    """The type that the row's kind names, as Video-R1 names them; `exact` for a kind that none stands for."""
    return BY_KIND.get(row.kind.strip().lower(), exact)(row, text, finished)


BY_KIND: dict[str, Callable[[Row, str, bool], float]] = {
    "multiple choice": multiple_choice,
    "multiple_choice": multiple_choice,
    "numerical": numerical,
    "regression": regression,
    "ocr": ocr,
    "free-form": free_text,
    "free_text": free_text,
    "math": math_equal,
}

TYPES: dict[str, Callable[[Row, str, bool], float]] = {
    "auto": auto,
    "exact": exact,
    "multiple_choice": multiple_choice,
    "numerical": numerical,
    "regression": regression,
    "ocr": ocr,
    "free_text": free_text,
    "math": math_equal,
    "format": answer_format,
    "think_format": think_format,
}
"""Reward types by the name a profile uses."""

ISOLATED = frozenset({"auto", "math"})
"""Types that have to run in a worker process."""


def _folded(text: str) -> str:
    return " ".join(text.lower().split())


def _options(row: Row) -> list[str]:
    options = row.extra.get("options")
    return [str(option) for option in options] if isinstance(options, list | tuple) else []


def _letter(answer: str, options: Sequence[str]) -> str | None:
    """Letter of an option given by letter or by its text (with or without its letter)."""
    wanted = _folded(answer)
    for index, option in enumerate(options):
        letter = option_letter(option) if len(option.strip()) > 1 else None
        bare = re.sub(r"^\s*\(?[A-Za-z][.:)]\s*", "", option) if letter else option
        if wanted in (_folded(option), _folded(bare)):
            return letter or chr(ord("A") + index)
    return option_letter(answer)


def _readings(number: Number, right: Number) -> tuple[float, ...]:
    """Values an answer may stand for: where just one side writes a percent sign, both scales are allowed."""
    if number.percent == right.percent:
        return (number.value,)
    return (number.value, number.value / 100 if number.percent else number.value * 100)


def _close(value: float, right: Number) -> bool:
    tolerance = 0.5 * 10.0**-right.decimals if right.decimals else 0.0
    return abs(value - right.value) <= max(tolerance, 1e-6 * abs(right.value)) * (1 + 1e-9)


def _overlap(given: Sequence[str], right: Sequence[str], n: int) -> int:
    """n-grams in common, each as often as it occurs in both."""
    counts = [Counter(tuple(w[i : i + n]) for i in range(len(w) - n + 1)) for w in (given, right)]
    return (counts[0] & counts[1]).total()


def _f1(common: int, num_given: int, num_right: int) -> float:
    """Two texts without any n-gram (both too short) count as equal where nothing speaks against it: 0."""
    return 2 * common / (num_given + num_right) if common else 0.0


def _tags_once(text: str) -> bool:
    return all(text.count(tag) <= 1 for tag in _TAGS)


def _as_formula(answer: str) -> str:
    r"""In `\(...\)`-like delimiters, which `math-verify` wants around LaTeX."""
    return answer if "$" in answer or "\\(" in answer or "\\boxed" in answer else f"${answer}$"
