"""A Profile back to YAML with every default written out."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Any

import yaml

from rollplex_cli.profile.source import AMBIGUOUS, BOOLEAN, NULL

if TYPE_CHECKING:
    from rollplex_cli.profile.schema import Profile

PLAIN = re.compile(r"[A-Za-z_/.][A-Za-z0-9_/.-]*\Z")
"""Text that may stand without quotes, unless it is one of the words that mean something else."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that any YAML version could read as something else."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _text(dumper: _Dumper, value: str) -> yaml.ScalarNode:
    word = PLAIN.match(value) and value[0] != "." and value not in AMBIGUOUS | NULL | set(BOOLEAN)
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=None if word else '"')


_Dumper.add_representer(str, _text)


def resolved_yaml(profile: Profile) -> str:
    """The profile as YAML text with all keys; `parse_profile` reads an equal profile from it."""
    values = dataclasses.asdict(profile)
    values["optimizer"]["betas"] = list(values["optimizer"]["betas"])
    if values["lora"] is not None:
        values["lora"]["targets"] = list(values["lora"]["targets"])
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=False, width=120)
