"""Rows of public data sets as samples.

Recognised by their columns: Video-R1 (`problem`, `solution`, `path`, `data_type`, `problem_type`, `options`), verl
(`prompt` as chat messages, `images`, `videos`, `reward_model`, `extra_info`), and plain ones (a question, an answer,
`image(s)`, `video(s)`), among them GSM8K, whose answer follows `####`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from rollplex_cli.core.errors import DataError
from rollplex_cli.data.rows.cells import choices_of, is_nothing, text_of
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
_MEDIA_PARTS: dict[str, Kind] = {"image": "image", "image_url": "image", "video": "video", "video_url": "video"}
"""Types of the parts of a chat message that are media."""
_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov", ".gif", ".png", ".jpg", ".jpeg", ".webp", ".bmp")
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
        choices = choices_of(row.get("options"))
        answer, kind = _answer(row), _kind(row)
        extra = {key: value for key, value in row.items() if key not in _USED and _is_plain(value)}
        if choices:
            extra["options"] = choices
        prompt, shown = row.get("prompt"), _Shown()
        turns = [_turn(m, shown) for m in prompt] if isinstance(prompt, list) else [("user", _question(row, choices))]
        messages = _messages(turns, _join(_media(row, media), shown, media), options)
        _check_text(answer, messages)
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


def _question(row: Mapping[str, Any], choices: Sequence[str]) -> str:
    text = _first_text(row, QUESTIONS, "question")
    if text.lstrip().startswith("[{") and '"role"' in text:
        raise DataError("its prompt is chat messages written as text: store them as a list")
    if not all(choice in text for choice in choices):
        text += "\nOptions:\n" + "\n".join(choices)
    return text


def _answer(row: Mapping[str, Any]) -> str:
    model = row.get("reward_model")
    if isinstance(model, dict) and model.get("ground_truth") is not None:
        found = text_of(model["ground_truth"])
        if found is None:
            shown = str(model["ground_truth"])[:60]
            raise DataError(f"its `reward_model.ground_truth` is neither a text nor a number: {shown!r}")
        answer = found
    else:
        answer = _first_text(row, ANSWERS, "answer")
    result = _result(answer)
    tagged = _TAGGED.fullmatch(answer if result is None else result)
    answer = (tagged.group(1) if tagged else answer if result is None else result).strip()
    if not answer:
        raise DataError("its answer is empty: no response could be right")
    return answer


def _result(answer: str) -> str | None:
    """What follows `####` on the last line, as in GSM8K. Elsewhere it is a heading."""
    _, mark, tail = answer.rstrip().rpartition("####")
    return tail if mark and "\n" not in tail else None


def _kind(row: Mapping[str, Any]) -> str:
    if isinstance(row.get("answer"), str) and _result(row["answer"]) is not None:
        return "numerical"
    return next((str(row[key]) for key in KINDS if isinstance(row.get(key), str) and row[key]), "")


def _first_text(row: Mapping[str, Any], names: Sequence[str], what: str) -> str:
    for name in names:
        if (text := text_of(row.get(name))) is not None:
            return text
    odd = [f"`{name}` is {str(row[name])[:40]!r}" for name in names if not is_nothing(row.get(name))]
    found = "; ".join(odd) or ", ".join(map(str, row))
    raise DataError(f"no {what} in it, expected text or a number in one of the columns {', '.join(names)}: {found}")


def _media(row: Mapping[str, Any], files: MediaFiles) -> dict[Kind, list[MediaRef]]:
    found: dict[Kind, list[MediaRef]] = {"video": [], "image": []}
    if (kind := _kind_of_path(row)) is not None:
        paths = row["path"] if isinstance(row["path"], list) else [row["path"]]
        found[kind] += [files.reference(path, kind) for path in paths]
    for kind in found:
        for column in _MEDIA[kind]:
            value = row.get(column)
            values = value if isinstance(value, list) else [value]
            found[kind] += [files.reference(item, kind) for item in values if not is_nothing(item)]
    return found


def _kind_of_path(row: Mapping[str, Any]) -> Kind | None:
    """What the column `path` names; None where it names no medium.

    Raises DataError where it may well: a row trained without its medium would go unnoticed.
    """
    path, kind = row.get("path"), row.get("data_type")
    if is_nothing(path) or path == []:
        return None
    if is_nothing(kind):
        first = path[0] if isinstance(path, list) else path
        if str(first).lower().endswith(_SUFFIXES):
            raise DataError(f"`path` names a medium, and no `data_type` says which kind: {str(first)[:60]!r}")
        return None
    name = str(kind).strip().lower()
    if name not in ("video", "image", "text"):
        raise DataError(f"`data_type` is none of video, image, text: {kind!r}")
    return None if name == "text" else cast("Kind", name)


@dataclass(slots=True)
class _Shown:
    """Media parts of a prompt's messages by kind, in their order: what each names, or None."""

    video: list[Any] = field(default_factory=list)
    image: list[Any] = field(default_factory=list)


def _join(columns: dict[Kind, list[MediaRef]], shown: _Shown, files: MediaFiles) -> dict[Kind, list[MediaRef]]:
    """Media of a row whether its columns name them or its messages do."""
    kinds: tuple[Kind, ...] = ("video", "image")
    for kind in kinds:
        parts = getattr(shown, kind)
        named = [part for part in parts if part is not None]
        if named and (columns[kind] or len(named) < len(parts)):
            raise DataError(f"some of its {kind} files are named in messages and some elsewhere")
        if parts and not named and not columns[kind]:
            raise DataError(f"a message has a place for a file ({kind}), and the row names none")
        columns[kind] += [files.reference(value, kind) for value in named]
    return columns


def _part(part: Any, shown: _Shown) -> str:
    """Text of a part of a message; a medium becomes a placeholder."""
    if isinstance(part, str):
        return part
    kind = _MEDIA_PARTS.get(str(part.get("type"))) if isinstance(part, dict) else None
    if kind is not None:
        keys = (kind, f"{kind}_url", "path", "url", "bytes")
        getattr(shown, kind).append(next((part[key] for key in keys if not is_nothing(part.get(key))), None))
        return f"<{kind}>"
    text = part.get("text") or "" if isinstance(part, dict) and part.get("type", "text") == "text" else None
    if not isinstance(text, str):
        raise DataError(f"a message holds something that is neither text nor a medium: {str(part)[:60]!r}")
    return text


def _check_text(answer: str, messages: Sequence[Message]) -> None:
    for text in (answer, *(part for message in messages for part in message.content if isinstance(part, str))):
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise DataError(f"text with half a character (a lone surrogate): {text[:60]!r}")
    if not any(isinstance(part, MediaRef) or part.strip() for part in messages[-1].content):
        raise DataError("its question is empty")


def _turn(message: Any, shown: _Shown) -> tuple[str, str]:
    """Role and text of one chat message; content given as parts has its media written as placeholders."""
    role = message.get("role") if isinstance(message, dict) else None
    content = message.get("content") if isinstance(message, dict) else None
    if role not in _ROLES:
        raise DataError(f"a message of the prompt has no role of {', '.join(_ROLES)}: {str(message)[:60]!r}")
    if isinstance(content, list):
        content = "".join(_part(part, shown) for part in content)
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
