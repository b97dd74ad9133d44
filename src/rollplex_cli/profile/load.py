"""Profile or site, by name or file, plus overrides, to validated settings; or one error with every fault in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from rapidfuzz import fuzz, process

from rollplex_cli.core.errors import ProfileError
from rollplex_cli.core.resources import shipped_profiles, shipped_sites
from rollplex_cli.profile import checks, fields
from rollplex_cli.profile.presets import fill_in
from rollplex_cli.profile.schema import Profile
from rollplex_cli.profile.site import Site
from rollplex_cli.profile.source import Fault, KeyPath, Source, apply_override, dotted, read_source

if TYPE_CHECKING:
    from collections.abc import Sequence

Schema = TypeVar("Schema", Profile, Site)

NEAR = 60.0
"""Similarity (0 to 100) from which a key counts as a near match."""


def load_profile(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Profile:
    """Load a profile.

    Args:
        name_or_path: a shipped profile (`tiny` or `tiny.yaml`, from any directory), or a path to a file. A file
            that exists wins over a shipped profile of that name.
        overrides: `a.b=c` each, later ones win; `c` is read as YAML.

    Raises:
        ProfileError: no such profile, or faults in it; the message lists all faults with their places.
    """
    path = find_profile(name_or_path)
    return parse_profile(_read(path), path.name, overrides)


def parse_profile(text: str, name: str, overrides: Sequence[str] = ()) -> Profile:
    """Load a profile from its text; `name` is what messages call it. Raises ProfileError."""
    source = _source(text, name, overrides)
    fill_in(source.values)
    profile = _validate(source, Profile)
    if profile is not None and not source.faults:
        for key, fault in checks.faults(profile):
            source.fault(tuple(key.split(".")), fault)
    if source.faults or profile is None:
        raise _error(source, "profile")
    return profile


def load_site(name_or_path: str | Path, overrides: Sequence[str] = ()) -> Site:
    """Load what belongs to a cluster: a shipped site by name, or a file. Arguments and errors as `load_profile`."""
    path = _find(name_or_path, shipped_sites(), "site")
    source = _source(_read(path), path.name, overrides)
    site = _validate(source, Site)
    if site is not None and not source.faults:
        for key, fault in checks.site_faults(site):
            source.fault(tuple(key.split(".")), fault)
    if source.faults or site is None:
        raise _error(source, "site")
    return site


def find_profile(name_or_path: str | Path) -> Path:
    """The file of a profile. Raises ProfileError that names near matches."""
    return _find(name_or_path, shipped_profiles(), "profile")


def _find(name_or_path: str | Path, shipped: dict[str, Path], what: str) -> Path:
    given = Path(name_or_path)
    if given.is_file():
        return given
    plain = str(name_or_path).removesuffix(".yaml").removesuffix(".yml")
    if plain in shipped:
        return shipped[plain]
    near = nearest(plain, list(shipped))
    hint = f"did you mean `{near}`? " if near else ""
    known = ", ".join(f"`{name}`" for name in shipped)
    raise ProfileError(f"no such {what}: `{name_or_path}`", hint=f"{hint}shipped {what}s are {known}")


def _source(text: str, name: str, overrides: Sequence[str]) -> Source:
    source = read_source(text, name)
    for order, argument in enumerate(overrides):
        apply_override(source, argument, order)
    return source


def nearest(word: str, choices: Sequence[str]) -> str | None:
    """The choice most like a word; None if none is near."""
    found = process.extractOne(word, choices, scorer=fuzz.ratio, score_cutoff=NEAR)
    return found[0] if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"cannot read the file: `{path}` ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ProfileError(f"the file is not UTF-8 text: `{path}`") from error


def _validate(source: Source, kind: type[Schema]) -> Schema | None:
    if not source.readable:
        return None
    already = {dotted(path) for path in source.stand_ins}
    try:
        # Strict mode takes sections as mappings and pairs as lists only from JSON, which is what YAML gives.
        return TypeAdapter(kind).validate_json(json.dumps(source.values))
    except ValidationError as error:
        for item in error.errors(include_url=False, include_context=False):
            path, text = _describe(source, kind, item["type"], item["loc"], item["input"])
            if dotted(path) not in already:
                already.add(dotted(path))
                source.fault(path, text)
    return None


def _describe(source: Source, schema: type, kind: str, location: KeyPath, value: Any) -> tuple[KeyPath, str]:
    if kind == "unexpected_keyword_argument":
        return location, _unknown(schema, location)
    path, found = _real_path(source, schema, location)
    annotation = fields.annotation_at(schema, path)
    if kind == "missing" and path == location:
        return path, f"missing, expected {fields.expected(annotation)}"
    if path != location:
        value = found
    return path, f"got {_shown(value)}, expected {fields.expected(annotation)}"


def _real_path(source: Source, schema: type, location: KeyPath) -> tuple[KeyPath, Any]:
    """A location and its value without what pydantic adds to it: union branches, absent list elements."""
    known: KeyPath = ()
    values: Any = source.values
    for part in location:
        if isinstance(values, dict) and (part in values or part in _names(schema, known)):
            values = values.get(str(part))
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
        else:
            break
        known = (*known, part)
    return known, values


def _names(schema: type, path: KeyPath) -> list[str]:
    section = fields.section_of(fields.annotation_at(schema, path))
    return list(fields.fields_of(section)) if section else []


def _unknown(schema: type, location: KeyPath) -> str:
    names = _names(schema, location[:-1])
    elsewhere = [path for path in fields.key_paths(schema) if path.split(".")[-1] == location[-1]]
    near = elsewhere[0] if elsewhere else nearest(str(location[-1]), names)
    if near:
        return f"unknown key, did you mean `{near}`?"
    return "unknown key, expected one of " + ", ".join(f"`{name}`" for name in names)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return f"`{json.dumps(value)}`"
    if isinstance(value, str):
        return f"the text `{value if len(value) <= 60 else value[:57] + '...'}`"
    return f"{value}"


def _error(source: Source, what: str) -> ProfileError:
    faults = sorted(source.faults, key=lambda fault: fault.order)
    count = "a fault" if len(faults) == 1 else f"{len(faults)} faults"
    lines = "".join(f"\n  {_clean(fault)}" for fault in faults)
    return ProfileError(f"{count} in {what} `{source.name}`:{lines}")


def _clean(fault: Fault) -> str:
    """One printable line whatever the file contained."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(fault))
