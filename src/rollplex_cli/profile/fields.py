"""The profile's keys as data, read from the schema's annotations: what a message may say about each."""

from __future__ import annotations

import dataclasses
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic.fields import FieldInfo


def fields_of(kind: type) -> dict[str, Any]:
    """Field name to annotation (with constraints) of a schema class."""
    return get_type_hints(kind, include_extras=True)


def section_of(annotation: Any) -> type | None:
    """The schema class an annotation stands for (`X` or `X | None`); None for plain values."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and dataclasses.is_dataclass(candidate):
            return candidate
    return None


def required(kind: type) -> list[str]:
    """Names of the fields a section cannot go without."""
    missing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(kind) if f.default is missing and f.default_factory is missing]


def key_paths(kind: type, prefix: str = "") -> list[str]:
    """Every key path under a section, `a.b` for nested ones, in schema order."""
    paths = []
    for name, annotation in fields_of(kind).items():
        section = section_of(annotation)
        paths += key_paths(section, f"{prefix}{name}.") if section else [prefix + name]
    return paths


def annotation_at(kind: type, path: tuple[str | int, ...]) -> Any:
    """The annotation of the deepest field or value a path leads to; the section itself for an empty path."""
    current: Any = kind
    for part in path:
        if get_origin(current) in (dict, tuple):
            current = [arg for arg in get_args(current) if arg is not Ellipsis][-1]
            continue
        section = section_of(current)
        if section is None or part not in (names := fields_of(section)):
            break
        current = names[str(part)]
    return current


def expected(annotation: Any) -> str:
    """What a value of this annotation looks like: `an integer >= 1`, `` `a` or `b` ``, `a mapping`."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return (expected(args[0]) + " " + _limits(args[1:])).strip()
    if origin is Literal:
        return _either([f"`{choice}`" for choice in args])
    if origin in (Union, types.UnionType):
        return _either([expected(arg) for arg in args])
    if origin is tuple:
        count = "values" if args[-1] is Ellipsis else f"{len(args)} values"
        return f"a list of {count}, each {expected(args[0])}"
    if origin is dict:
        return "a mapping of names to text, numbers, `true` or `false`"
    if section_of(annotation):
        return "a mapping"
    words = {bool: "`true` or `false`", int: "an integer", float: "a number", str: "text", type(None): "`null`"}
    return words.get(annotation, str(annotation))


def _either(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else ", ".join(choices[:-1]) + " or " + choices[-1]


def _limits(extras: tuple[Any, ...]) -> str:
    signs = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"), ("multiple_of", "divisible by"))
    metadata = [item for extra in extras for item in (extra.metadata if isinstance(extra, FieldInfo) else [extra])]
    parts = [f"{s} {getattr(item, name):g}" for item in metadata for name, s in signs if hasattr(item, name)]
    return " and ".join(parts)
