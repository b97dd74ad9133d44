"""Reading answers out of responses: tags, option letters, numbers. Total functions: any text gives a value."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_OPEN, _CLOSE = "<answer>", "</answer>"
_WORD = re.compile(r"\w+")
_OPTION = re.compile(r"\(?([A-Za-z])\)?(?:[.:)].*)?", re.DOTALL)
_NUMBER = re.compile(
    r"""(?P<sign>[+-]?)\s*(?:[$]|USD\s)?\s*
        (?:(?P<whole>\d+)\s+)??
        (?:(?P<above>\d+)\s*/\s*(?P<below>\d+)
          |(?P<plain>(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.(?P<decimals>\d*))?|\.(?P<bare>\d+))(?P<power>[eE][+-]?\d{1,3})?)
        \s*(?P<unit>%|[^\W\d_]+(?:[/^][^\W_]+)*|\u00b0\s*[CF]?)?\s*\.?""",
    re.VERBOSE,
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{\s*(\d+)\s*\}\{\s*(\d+)\s*\}")
MAX_NUMBER_CHARACTERS = 64
"""Longer text is no number; it keeps an adversarial response from costing time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number as it was written."""

    value: float
    percent: bool
    """Written with a percent sign; `value` is what stands before it."""
    decimals: int
    """Digits behind the point, 0 for fractions and whole numbers."""


def tagged_answers(text: str) -> list[str]:
    """What stands in each pair of tags, as written. Takes linear time: a response may be tags that never close."""
    found, end = [], 0
    while (start := text.find(_OPEN, end)) >= 0:
        start += len(_OPEN)
        if (stop := text.find(_CLOSE, start)) < 0:
            break
        found.append(text[start:stop])
        end = stop + len(_CLOSE)
    return found


def find_answer(text: str) -> str | None:
    """What stands between `<answer>` and `</answer>`, stripped; None without a pair of tags.

    Several pairs count only if they say the same: a response that names two answers has not decided.
    """
    found = {answer.strip() for answer in tagged_answers(text)}
    return found.pop() if len(found) == 1 else None


def truth(answer: str) -> str:
    """The true answer of a row, which some data sets wrap in answer tags themselves."""
    found = find_answer(answer)
    return answer.strip() if found is None else found


def option_letter(text: str) -> str | None:
    """The option that `B`, `b`, `(B)`, `B.`, `B) a dog` or `B: a dog` names, in upper case. `A dog` names none."""
    match = _OPTION.fullmatch(text.strip())
    return match.group(1).upper() if match else None


def parse_number(text: str) -> Number | None:
    """The number that `text` is: `1,000`, `-3.5`, `50 %`, `3/4`, `1 1/2`, `\\frac{3}{4}`, `2e3`, `$5`, `5 cm`.

    None for anything else: several numbers, words, division by zero, infinities, or more than 64 characters.
    """
    cleaned = text.strip().strip("$").replace("\u2212", "-").replace("\\%", "%").strip()
    if not cleaned or len(cleaned) > MAX_NUMBER_CHARACTERS:
        return None
    match = _NUMBER.fullmatch(_LATEX_FRACTION.sub(r"\1/\2", cleaned))
    value = None if match is None else _value(match)
    if match is None or value is None or not math.isfinite(value):
        return None
    decimals = len(match["decimals"] or match["bare"] or "") if not match["power"] else 0
    return Number(value=value, percent=match["unit"] == "%", decimals=decimals)


def _value(match: re.Match[str]) -> float | None:
    whole = int(match["whole"] or 0)
    if match["above"] is not None:
        if int(match["below"]) == 0:
            return None
        size = whole + int(match["above"]) / int(match["below"])
    elif match["whole"] is not None:
        return None  # two numbers side by side
    else:
        size = float(match["plain"].replace(",", "") + (match["power"] or ""))
    return -size if match["sign"] == "-" else size


def words(text: str) -> list[str]:
    """Words of a text in lower case, punctuation dropped; any script that separates words."""
    return _WORD.findall(text.lower())
