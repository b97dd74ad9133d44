from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from rollplex_cli.plan.build import build_plan
from rollplex_cli.plan.memory import MemoryInputs
from rollplex_cli.profile.load import load_profile


@pytest.fixture(scope="session")
def inputs() -> Callable[..., MemoryInputs]:
    """`inputs(profile, **changes)`: what the plan of a shipped profile is computed from."""

    @cache
    def plain(profile: str) -> MemoryInputs:
        return build_plan(load_profile(profile)).memory_inputs

    def make(profile: str = "qwen25vl32b", **changes: Any) -> MemoryInputs:
        return replace(plain(profile), **changes)

    return make
