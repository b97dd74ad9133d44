"""Rows of public data sets as samples.

Recognised by their columns: Video-R1 (`problem`, `solution`, `path`, `data_type`, `problem_type`, `options`), verl
(`prompt` as chat messages, `images`, `videos`, `reward_model`, `extra_info`), and plain ones (a question, an answer,
`image(s)`, `video(s)`), among them GSM8K, whose answer follows `####`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from rollplex_cli.core.errors import DataError
from rollplex_cli.data.types import MediaRef, Message, Sample

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollplex_cli.data.rows.media import Kind, MediaFiles

QUESTIONS = ("question", "problem", "prompt", "query", "instruction")
ANSWERS = ("answer", "solution", "ground_truth", "response", "label", "target")
KINDS = ("problem_type", "kind", "question_type", "ability")
_MEDIA = {"video": ("video", "videos"), "image": ("image", "images")}
_USED = {*QUESTIONS, *ANSWERS, *KINDS, "video", "videos", "image", "images", "path", "data_type", "reward_model"}
_TAGGED = re.compile(r"\s*<answer>(.*)</answer>\s*", re.DOTALL)
_PLACEHOLDER = re.compile(r"<(image|video)>")
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """What is put around the questions of a data set."""

    system: str = ""
    """Text of a system turn; none where empty."""
    instruction: str = ""
    """Put behind each question, on a line of its own."""
    default_kind: str = "exact"
    """Kind of rows that name none."""


def to_sample(row: Mapping[str, Any], sample_id: str, media: MediaFiles, options: TextOptions) -> Sample:
    """One row as a sample.

    Raises:
        DataError: no question or answer in it, media it cannot mean, or placeholders that do not fit its media.
    """
    try:
        references = _media(row, media)
        answer, kind = _answer(row), _kind(row)
        extra = {key: value for key, value in row.items() if key not in _USED and _is_plain(value)}
        prompt = row.get("prompt")
        turns = [_turn(message) for message in prompt] if isinstance(prompt, list) else [("user", _question(row))]
        messages = _messages(turns, references, options)
    except DataError as error:
        raise DataError(f"row `{sample_id}`: {error.message}", hint=error.hint) from None
    placed = tuple(part for message in messages for part in message.content if isinstance(part, MediaRef))
    texts = [part for part in messages[-1].content if isinstance(part, str)]
    return Sample(
        sample_id=sample_id,
        question="".join(texts),
        answer=answer,
        kind=kind or options.default_kind,
        media=placed,
        extra=extra,
        messages=messages,
    )


def _question(row: Mapping[str, Any]) -> str:
    text = _first_text(row, QUESTIONS, "question")
    options = row.get("options")
    if isinstance(options, list) and options and not all(str(option) in text for option in options):
        text += "\nOptions:\n" + "\n".join(str(option) for option in options)
    return text


def _answer(row: Mapping[str, Any]) -> str:
    model = row.get("reward_model")
    if isinstance(model, dict) and model.get("ground_truth") is not None:
        answer = str(model["ground_truth"])
    else:
        answer = _first_text(row, ANSWERS, "answer")
    answer = answer.rpartition("####")[2] if "####" in answer else answer
    tagged = _TAGGED.fullmatch(answer)
    return (tagged.group(1) if tagged else answer).strip()


def _kind(row: Mapping[str, Any]) -> str:
    if "####" in str(row.get("answer", "")):
        return "numerical"
    return next((str(row[key]) for key in KINDS if isinstance(row.get(key), str) and row[key]), "")


def _first_text(row: Mapping[str, Any], names: Sequence[str], what: str) -> str:
    for name in names:
        value = row.get(name)
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
    raise DataError(f"no {what} in it, expected one of the columns {', '.join(names)}: {', '.join(map(str, row))}")


def _media(row: Mapping[str, Any], files: MediaFiles) -> dict[Kind, list[MediaRef]]:
    found: dict[Kind, list[MediaRef]] = {"video": [], "image": []}
    if row.get("path") and row.get("data_type") in ("video", "image"):
        kind = cast("Kind", row["data_type"])
        paths = row["path"] if isinstance(row["path"], list) else [row["path"]]
        found[kind] += [files.reference(path, kind) for path in paths]
    for kind in found:
        for column in _MEDIA[kind]:
            value = row.get(column)
            values = value if isinstance(value, list) else [] if value in (None, "", b"") else [value]
            found[kind] += [files.reference(item, kind) for item in values if item is not None]
    return found


def _turn(message: Any) -> tuple[str, str]:
    """Role and text of one chat message; content given as parts has its media written as placeholders."""
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if role not in _ROLES:
        raise DataError(f"a message of the prompt has no role of {', '.join(_ROLES)}: {str(message)[:60]!r}")
    if isinstance(content, list):
        parts = [p if isinstance(p, dict) else {"type": "text", "text": str(p)} for p in content]
        content = "".join(
            f"<{p['type']}>" if p.get("type") in ("image", "video") else str(p.get("text") or "") for p in parts
        )
    if not isinstance(content, str):
        raise DataError(f"a message of the prompt has no text: {str(message)[:60]!r}")
    return role, content


def _messages(
    turns: Sequence[tuple[str, str]], media: Mapping[Kind, list[MediaRef]], options: TextOptions
) -> tuple[Message, ...]:
    """Put media where their placeholders stand, or before the text where it has none.

    A kind of which the row has no medium has no placeholders either: `<image>` in a text-only row is text.
    """
    if not turns or turns[-1][0] != "user":
        raise DataError("the prompt does not end with a turn of the user")
    rest = {kind: list(found) for kind, found in media.items()}
    all_text = "".join(text for _, text in turns)
    for kind, found in media.items():
        count = all_text.count(f"<{kind}>")
        if found and count not in (0, len(found)):
            raise DataError(f"{len(found)} {kind} files do not fit {count} placeholders `<{kind}>`")
    messages = []
    if options.system and turns[0][0] != "system":
        messages.append(Message(role="system", content=(options.system,)))
    first_user = next(index for index, (role, _) in enumerate(turns) if role == "user")
    for index, (role, text) in enumerate(turns):
        content: list[str | MediaRef] = []
        if index == first_user:
            content += [m for kind in ("video", "image") if f"<{kind}>" not in all_text for m in rest[kind]]
        whole = f"{text}\n{options.instruction}" if options.instruction and index == len(turns) - 1 else text
        content += _placed(whole, {kind for kind, found in media.items() if found}, rest)
        messages.append(Message(role=role, content=tuple(content)))  # type: ignore[arg-type]
    return tuple(messages)


def _placed(text: str, kinds: set[Kind], rest: Mapping[Kind, list[MediaRef]]) -> list[str | MediaRef]:
    parts: list[str | MediaRef] = []
    end = 0
    for match in _PLACEHOLDER.finditer(text):
        kind = cast("Kind", match.group(1))
        if kind in kinds and rest[kind]:
            parts += [text[end : match.start()], rest[kind].pop(0)]
            end = match.end()
    parts.append(text[end:])
    return [part for part in parts if part != ""]


def _is_plain(value: Any) -> bool:
    """Whether a value survives JSON unchanged."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, str | int | float | bool)
