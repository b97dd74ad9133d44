"""Every reward type on answers as models give them: always a number, and the right one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.rl.rewards.text import find_answer, option_letter, parse_number, tagged_answers
from rollplex_cli.rl.rewards.types import MAX_FORMULA, TYPES


@dataclass(frozen=True)
class Row:
    answer: str
    kind: str = "numerical"
    sample_id: str = "row-1"
    extra: dict[str, Any] = field(default_factory=dict)


def reward(kind: str, answer: str, truth: str, **extra: Any) -> float:
    """Reward of `<answer>answer</answer>`."""
    return TYPES[kind](Row(truth, extra=extra), f"<answer>{answer}</answer>", True)


NO_ANSWER = ["", "B", "<answer>B", "B</answer>", "<answer>A</answer> no, <answer>B</answer>", "<ANSWER>B</ANSWER>"]


@pytest.mark.parametrize("kind", ["exact", "multiple_choice", "numerical", "regression", "ocr", "free_text"])
@pytest.mark.parametrize("text", NO_ANSWER)
@pytest.mark.parametrize("finished", [True, False])
def test_no_decided_answer_earns_nothing(kind: str, text: str, finished: bool) -> None:
    truth = {"numerical": "5", "regression": "5"}.get(kind, "B")
    assert TYPES[kind](Row(truth), text, finished) == 0.0


@pytest.mark.parametrize("kind", ["exact", "multiple_choice", "ocr"])
def test_two_equal_answers_are_one(kind: str) -> None:
    assert TYPES[kind](Row("B"), "<answer>B</answer> so <answer> B </answer>", True) == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1,000", 1000.0),
        ("12,345,678.5", 12345678.5),
        ("-3.5", -3.5),
        ("\u22123.5", -3.5),
        ("+7", 7.0),
        ("50 %", 50.0),
        ("50%", 50.0),
        ("50\\%", 50.0),
        ("3/4", 0.75),
        ("-3/4", -0.75),
        ("1 1/2", 1.5),
        ("\\frac{3}{4}", 0.75),
        ("$\\dfrac{1}{2}$", 0.5),
        ("2e3", 2000.0),
        ("1.5E-2", 0.015),
        (".5", 0.5),
        ("5.", 5.0),
        ("$5", 5.0),
        ("5 cm", 5.0),
        ("5 m/s", 5.0),
        ("3.2\u00b0C", 3.2),
        (" 42 ", 42.0),
        ("0", 0.0),
        ("007", 7.0),
        ("", None),
        ("five", None),
        ("1,00", None),
        ("1 2", None),
        ("3 or 4", None),
        ("5/0", None),
        ("nan", None),
        ("inf", None),
        ("1e999", None),
        ("--5", None),
        ("1.2.3", None),
        ("%", None),
        ("$", None),
        ("9" * 65, None),
        ("1 e 5 x", None),
        ("x=5", None),
        ("\x00", None),
        ("\u0661\u0662\u0663", 123.0),
        ("\uff11\uff12", 12.0),
        ("\u00bd", None),
        ("\u00b2", None),
        ("0x10", None),
        ("1_000", None),
        ("9" * 60 + "/1", 1e60),
    ],
)
def test_parse_number(text: str, expected: float | None) -> None:
    number = parse_number(text)
    assert (None if number is None else number.value) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(B)", "B"),
        ("B.", "B"),
        ("B) a dog", "B"),
        ("b: a dog", "B"),
        (" C ", "C"),
        ("A dog", None),
        ("BC", None),
        ("", None),
        ("2", None),
        ("(B", "B"),
        ("\u00c4", None),
    ],
)
def test_option_letter(text: str, expected: str | None) -> None:
    assert option_letter(text) == expected


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("B", "B", 1.0),
        ("(b)", "B", 1.0),
        ("B. a dog", "<answer>B</answer>", 1.0),
        ("A", "B", 0.0),
        ("a dog", "B", 1.0),
        ("A dog", "B", 1.0),
        ("a cat", "B", 0.0),
        ("B and C", "B", 0.0),
        ("", "B", 0.0),
        ("1,000", "B", 0.0),
        ("\u00df", "B", 0.0),
    ],
)
def test_multiple_choice(answer: str, truth: str, expected: float) -> None:
    assert reward("multiple_choice", answer, truth, options=["A. a cat", "B. a dog", "C. a cow"]) == expected


def test_options_without_letters_are_counted() -> None:
    assert reward("multiple_choice", "a dog", "B", options=["a cat", "a dog"]) == 1.0
    assert reward("multiple_choice", "B", "a dog", options=["a cat", "a dog"]) == 1.0


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("1,000", "1000", 1.0),
        ("50 %", "50", 1.0),
        ("50 %", "0.5", 1.0),
        ("0.5", "50 %", 1.0),
        ("50 %", "50%", 1.0),
        ("3/4", "0.75", 1.0),
        ("0.33", "1/3", 0.0),
        ("1/3", "0.33", 1.0),
        ("3.14159", "3.14", 1.0),
        ("3.146", "3.14", 0.0),
        ("3.135", "3.14", 1.0),
        ("1000001", "1000000", 1.0),
        ("1000002", "1000000", 0.0),
        ("0", "0", 1.0),
        ("-0.0", "0", 1.0),
        ("0.001", "0", 0.0),
        ("five", "5", 0.0),
        ("5 apples", "5", 1.0),
        ("", "5", 0.0),
        ("many", "many", 1.0),
        ("5", "many", 0.0),
        ("5", "", 0.0),
        ("1e308", "1e308", 1.0),
        ("-1e308", "1e308", 0.0),
        ("nan", "nan", 1.0),
        ("nan", "5", 0.0),
    ],
)
def test_numerical(answer: str, truth: str, expected: float) -> None:
    assert reward("numerical", answer, truth) == expected


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("10", "10", 1.0),
        ("9", "10", 0.9),
        ("11", "10", 0.9),
        ("25", "10", 0.0),
        ("-10", "10", 0.0),
        ("0", "0", 1.0),
        ("1", "0", 0.0),
        ("ten", "10", 0.0),
        ("", "10", 0.0),
        ("10", "ten", 0.0),
        ("1,100", "1,000", 0.9),
        ("45 %", "0.5", 0.9),
        ("9/10", "1", 0.9),
        ("-1e308", "1e308", 0.0),
        ("1e308", "1e-300", 0.0),
    ],
)
def test_regression(answer: str, truth: str, expected: float) -> None:
    assert reward("regression", answer, truth) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("answer", "truth", "expected"),
    [
        ("the quick fox", "the quick fox", 1.0),
        ("The  Quick, Fox!", "the quick fox", 1.0),
        ("the fox", "the quick fox", 2 / 3),
        ("a b c d e f", "x y", 0.0),
        ("", "the quick fox", 0.0),
        ("", "", 1.0),
        ("x", "", 0.0),
        ("1,000", "1 000", 1.0),
    ],
)
def test_ocr(answer: str, truth: str, expected: float) -> None:
    assert reward("ocr", answer, truth) == pytest.approx(expected)


def test_free_text_against_hand_counts() -> None:
    # given: the cat sat (3 words), truth: the cat sat down (4 words).
    # ROUGE-1 2*3/7, ROUGE-2 2*2/5, ROUGE-L 2*3/7.
    assert reward("free_text", "the cat sat", "The cat sat down.") == pytest.approx((6 / 7 + 4 / 5 + 6 / 7) / 3)
    # Order matters to two of the three: 1, 0, 2*1/4.
    assert reward("free_text", "b a", "a b") == pytest.approx((1 + 0 + 0.5) / 3)
    assert reward("free_text", "", "a b") == 0.0
    assert reward("free_text", "a", "") == 0.0
    assert reward("free_text", "%", "50 %") == 0.0


@pytest.mark.parametrize(
    ("text", "finished", "plain", "think"),
    [
        ("<answer>B</answer>", True, 1, 0),
        ("<think>x</think><answer>B</answer>", True, 1, 1),
        ("<think>x</think>\n<answer>B</answer>\n", True, 1, 1),
        ("<think>x</think><answer>B</answer>", False, 0, 0),
        ("so <answer>B</answer>", True, 0, 0),
        ("<answer>B</answer><answer>C</answer>", True, 0, 0),
        ("<think>x</think><think>y</think><answer>B</answer>", True, 0, 0),
        ("", True, 0, 0),
        ("<answer></answer>", True, 1, 0),
    ],
)
def test_formats(text: str, finished: bool, plain: int, think: int) -> None:
    assert TYPES["format"](Row("B"), text, finished) == plain
    assert TYPES["think_format"](Row("B"), text, finished) == think


@pytest.mark.parametrize(
    ("text", "truth", "expected"),
    [
        ("<answer>\\frac{1}{2}</answer>", "0.5", 1.0),
        ("<answer>1/2</answer>", "\\frac{1}{2}", 1.0),
        ("<answer>1,000</answer>", "1000", 1.0),
        ("<answer>x^2+2x+1</answer>", "(x+1)^2", 1.0),
        ("the answer is 42", "42", 1.0),
        ("so \\boxed{42}", "42", 1.0),
        ("<answer>43</answer>", "42", 0.0),
        ("", "42", 0.0),
        ("<answer></answer>", "42", 0.0),
        ("<answer>\\frac{1}{</answer>", "0.5", 0.0),
        ("<answer>no idea</answer>", "42", 0.0),
        ("<answer>1/0</answer>", "42", 0.0),
        ("<answer>5</answer><answer>6</answer>", "5", 0.0),
    ],
)
def test_math(text: str, truth: str, expected: float) -> None:
    assert TYPES["math"](Row(truth), text, True) == expected


def test_a_formula_of_thousands_of_characters_is_wrong_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    import math_verify

    read: list[str] = []
    parse = math_verify.parse
    monkeypatch.setattr(math_verify, "parse", lambda text: (read.append(text), parse(text))[1])
    assert TYPES["math"](Row("5001"), "<answer>" + "1+" * 5000 + "1</answer>", True) == 0.0
    assert not read
    assert TYPES["math"](Row("5001"), "word " * 2000 + "so $5001$", True) == 1.0
    assert max(map(len, read)) <= MAX_FORMULA


@pytest.mark.parametrize(
    ("kind", "answer", "truth", "expected"),
    [
        ("multiple choice", "(b)", "B", 1.0),
        ("numerical", "1,000", "1000", 1.0),
        ("regression", "9", "10", 0.9),
        ("OCR", "a b", "a b c", 2 / 3),
        ("free-form", "a b", "a b", 1.0),
        ("math", "1/2", "0.5", 1.0),
        ("direction", "Left", "left", 1.0),
    ],
)
def test_auto_follows_the_kind_of_the_row(kind: str, answer: str, truth: str, expected: float) -> None:
    assert TYPES["auto"](Row(truth, kind=kind), f"<answer>{answer}</answer>", True) == pytest.approx(expected, abs=1e-6)


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=80), truth=st.text(max_size=30), finished=st.booleans())
def test_any_text_gives_a_number_from_0_to_1(text: str, truth: str, finished: bool) -> None:
    for response in (text, f"<answer>{text}</answer>"):
        for name, function in TYPES.items():
            if name not in ("math", "auto"):
                value = function(Row(truth, extra={"options": [truth, text]}), response, finished)
                assert math.isfinite(value)
                assert 0.0 <= value <= 1.0, name


@settings(max_examples=40, deadline=None)
@given(text=st.text(alphabet="0123456789+-*/^(){}\\fracsqt.,%$ xn", max_size=24))
def test_any_formula_gives_a_number(text: str) -> None:
    assert TYPES["math"](Row("1/2"), f"<answer>{text}</answer>", True) in (0.0, 1.0)


def test_find_answer_is_none_for_a_choice_between_two() -> None:
    assert find_answer("<answer>5</answer> or <answer>6</answer>") is None
    assert find_answer("<answer>\n5 </answer>") == "5"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>a</answer><answer></answer>", ["a", ""]),
        ("<answer><answer>a</answer></answer>", ["<answer>a"]),
        ("</answer><answer>a", []),
        ("<answer>" * 20_000, []),
        ("<answer>a</answer>" + "<answer>" * 20_000, ["a"]),
        ("<answer>" * 20_000 + "a</answer>", ["<answer>" * 19_999 + "a"]),
    ],
)
def test_pairs_of_tags(text: str, expected: list[str]) -> None:
    assert tagged_answers(text) == expected
