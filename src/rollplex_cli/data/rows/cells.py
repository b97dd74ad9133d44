"""What a cell of a table says, in the ways in which tables say it."""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any

from rollplex_cli.core.errors import DataError

_EXACT_FLOATS = 2**53
"""From here on not every whole number is a float."""


def is_nothing(value: Any) -> bool:
    """Whether a cell holds nothing: null, an empty text, NaN, or a mapping of nulls."""
    if isinstance(value, dict):
        return all(item is None for item in value.values())
    return value is None or value in ("", b"") or (isinstance(value, float) and math.isnan(value))


def text_of(value: Any) -> str | None:
    """A cell's text, None where it holds neither text nor a finite number. A truth value is neither: whether a model
    should say yes, true or 1 is not in the row."""
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        return None
    if isinstance(value, str | int):
        return str(value)
    if not (value.is_finite() if isinstance(value, Decimal) else math.isfinite(value)):
        return None
    # A column of whole numbers with gaps is stored as one of floats.
    whole = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_FLOATS
    return str(int(value) if whole else value)


def choices_of(value: Any) -> list[str]:
    """Options of a multiple choice: a list of texts, letters with their texts, or lines.

    Raises:
        DataError: an option is neither a text nor a number.
    """
    if is_nothing(value):
        return []
    if isinstance(value, str):
        return [line for line in value.splitlines() if line.strip()]
    if isinstance(value, dict):
        # Tables give every row all letters.
        return [f"{letter}. {_choice(text)}" for letter, text in value.items() if text is not None]
    return [_choice(text) for text in value] if isinstance(value, list) else []


def _choice(value: Any) -> str:
    text = str(value) if isinstance(value, bool) else text_of(value)
    if text is None:
        raise DataError(f"an option is neither a text nor a number: {str(value)[:60]!r}")
    return text
