"""What tests of every folder share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Side by side, the files that take longest begin first, so that no worker is left alone with one at the end."""
    if os.environ.get("PYTEST_XDIST_WORKER"):
        scenarios = Path(__file__).parent / "scenarios"
        items.sort(key=lambda item: (scenarios not in item.path.parents, item.get_closest_marker("scenario") is None))


@pytest.fixture(scope="session", autouse=True)
def own_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The list of the user's runs stays as it is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compares a text with the file of that name in tests/golden, whole; `make golden` rewrites the file instead.

    Tests that use it are named `test_golden_...`, so that `make golden` finds them.
    """

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if os.environ.get("ROLLPLEX_UPDATE_GOLDEN"):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), f"{path.name} differs; `make golden` accepts the new text"

    return check
