"""YAML text to plain values that remember where they were written.

Scalars are read as YAML 1.2 does, with the surprises of YAML 1.1 turned into faults: `yes` is neither text nor
a boolean, `1e-4` is a number, `1:30` is text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import yaml

BOOLEAN = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
NULL = {"", "~", "null", "Null", "NULL"}
AMBIGUOUS = {form for word in ("yes", "no", "on", "off") for form in (word, word.capitalize(), word.upper())}
INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)\Z")
REAL = re.compile(
    r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?\Z|[-+]?[0-9]+[eE][-+]?[0-9]+\Z"
    r"|[-+]?\.(inf|Inf|INF)\Z|\.(nan|NaN|NAN)\Z"
)
PLAIN_TAGS = {
    f"tag:yaml.org,2002:{kind}" for kind in ("str", "bool", "int", "float", "null", "timestamp", "merge", "value")
}
"""Tags that PyYAML gives scalars on its own; the scalar's text is read here instead."""
MAX_INTEGER = 2**63 - 1
MAX_DEPTH = 16
"""Deeper than any profile: ends the walk where an alias contains itself."""

KeyPath = tuple[str | int, ...]
Label = Callable[[int], tuple[str, int]]
"""Line number to the place in messages and its sort order."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something wrong at one place of a profile."""

    where: str
    """`file:line`, `file`, or the `--set` argument."""
    path: str
    """Key path; empty for the whole file."""
    text: str
    """What is wrong, the rest of the line."""
    order: int = 0
    """Sorts faults as the reader meets them: the line, then the command line."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.path, self.text) if part)


@dataclass(slots=True)
class Source:
    """Values of a profile with the place of each key path, and the faults found so far."""

    name: str
    """How messages call the file."""
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, tuple[str, int]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    stand_ins: set[KeyPath] = field(default_factory=set)
    """Paths whose value is a stand-in for one already reported."""
    readable: bool = True
    """False where the text gave no mapping at all."""

    def fault(self, path: KeyPath, text: str) -> None:
        """Record a fault at the place of `path`, or of the nearest key above that was written down."""
        where, order = self.place(path)
        self.faults.append(Fault(where, dotted(path), text, order))

    def place(self, path: KeyPath) -> tuple[str, int]:
        """Where a key was written: label and sort order."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, (self.name, 0))


def dotted(path: KeyPath) -> str:
    """A key path as written on the command line: `a.b`."""
    return ".".join(str(part) for part in path)


def read_source(text: str, name: str) -> Source:
    """Parse a whole file. Syntax errors, too, end up in `faults`."""
    source = Source(name)
    node = _compose(source, text, lambda line: (f"{name}:{line}", line))
    if not isinstance(node, yaml.MappingNode):
        source.readable = False
        if not source.faults:
            got = _kind(node) if node is not None else "nothing"
            source.fault((), f"got {got}, expected a mapping of keys to values")
        return source
    source.values = _convert(source, node, (), lambda line: (f"{name}:{line}", line))
    return source


def apply_override(source: Source, argument: str, order: int) -> None:
    """Put one `--set a.b=c` over the values; `c` is read as YAML. `order` sorts its faults among the others."""
    label = (f"--set {argument}", 1_000_000 + order)
    key, equals, text = argument.partition("=")
    parts: KeyPath = tuple(key.strip().split("."))
    if not equals or not all(parts):
        source.faults.append(Fault(label[0], "", "expected the form `key.path=value`", label[1]))
        return
    num_faults = len(source.faults)
    node = _compose(source, text, lambda _line: label)
    if len(source.faults) > num_faults:
        return
    target = source.values
    for depth, part in enumerate(parts[:-1], start=1):
        below = target.get(str(part))
        if not isinstance(below, dict):
            # A section that is absent, `null` or no section at all begins anew here.
            below = target[str(part)] = {}
            source.places[parts[:depth]] = label
        target = below
    for path in [path for path in source.places if path[: len(parts)] == parts]:
        del source.places[path]
    source.places[parts] = label
    target[str(parts[-1])] = None if node is None else _convert(source, node, parts, lambda _line: label)


def _compose(source: Source, text: str, label: Label) -> yaml.Node | None:
    try:
        node: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where, order = label(mark.line + 1 if mark else 1)
        source.faults.append(Fault(where, "", f"not valid YAML: {error.problem or error.context}", order))
        return None
    except yaml.YAMLError as error:
        # Characters that YAML does not allow carry no line number.
        where, order = label(1)
        source.faults.append(Fault(where, "", f"not valid YAML: {str(error).splitlines()[0]}", order))
        return None
    return node


def _convert(source: Source, node: yaml.Node, path: KeyPath, label: Label) -> Any:
    source.places.setdefault(path, label(node.start_mark.line + 1))
    if len(path) > MAX_DEPTH:
        return _stand_in(source, path, f"nested deeper than {MAX_DEPTH} levels", None)
    if isinstance(node, yaml.SequenceNode):
        return [_convert(source, item, (*path, index), label) for index, item in enumerate(node.value)]
    if isinstance(node, yaml.MappingNode):
        return _mapping(source, node, path, label)
    return _scalar(source, node, path)


def _mapping(source: Source, node: yaml.MappingNode, path: KeyPath, label: Label) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        place = label(key_node.start_mark.line + 1)
        if not isinstance(key_node, yaml.ScalarNode):
            text = f"got {_kind(key_node)} as a key, expected a name"
            source.faults.append(Fault(place[0], dotted(path), text, place[1]))
            continue
        key = key_node.value
        below = (*path, key)
        if key in values:
            first = source.places[below][0]
            source.faults.append(Fault(place[0], dotted(below), f"duplicate key, first given at {first}", place[1]))
            continue
        source.places[below] = place
        values[key] = _convert(source, value_node, below, label)
    return values


def _scalar(source: Source, node: yaml.Node, path: KeyPath) -> Any:
    text: str = node.value
    if node.tag not in PLAIN_TAGS:
        return _stand_in(source, path, f"got the tag `{node.tag}`, expected a plain value", text)
    if getattr(node, "style", None) is not None:
        return text
    if text in AMBIGUOUS:
        wanted = f'`true` or `false`, or `"{text}"` in quotes for text'
        return _stand_in(source, path, f"got `{text}`, expected {wanted}", False)
    if text in NULL:
        return None
    if text in BOOLEAN:
        return BOOLEAN[text]
    if INTEGER.match(text):
        return _integer(source, text, path)
    if REAL.match(text):
        return _real(source, text, path)
    return text


def _integer(source: Source, text: str, path: KeyPath) -> Any:
    # int() itself refuses very long texts.
    value = int(text) if len(text) < 40 else MAX_INTEGER + 1
    if abs(value) > MAX_INTEGER:
        return _stand_in(source, path, f"got {text}, expected an integer of at most 64 bits", 0)
    return value


def _real(source: Source, text: str, path: KeyPath) -> Any:
    value = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if not math.isfinite(value):
        return _stand_in(source, path, f"got `{text}`, expected a finite number", 1.0)
    return value


def _stand_in(source: Source, path: KeyPath, text: str, value: Any) -> Any:
    """Report a value and go on with another, so that the faults behind it are found too."""
    source.fault(path, text)
    source.stand_ins.add(path)
    return value


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return "a single value"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"
