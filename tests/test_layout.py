"""The shape of the repository: sizes, names, and which package may be imported where."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "rollplex_cli"
CODE = sorted(path for folder in ("src", "tests", "tools", "jobs") for path in (ROOT / folder).rglob("*.py"))
SOURCES = sorted(PACKAGE.rglob("*.py"))

MAX_LINES = 400
MAX_FILES = 13
TOP_LEVEL = {"src", "tests", "tools", "jobs", "profiles", "pyproject.toml", "Makefile", "README.md", "LICENSE"}
"""Everything that may stand at the top; dotfiles aside."""
GENERATED = {"runs", "build", "dist"}
"""Ignored by git."""

ONLY_IMPORTERS = {
    "sglang": "engines/rollout",
    "deepspeed": "engines/trainer",
    "cuda": "memory/vmm",
    "yaml": "profile",
    "pydantic": "profile",
    "subprocess": "launch",
    "submitit": "launch",
    "typer": "cli",
    "matplotlib": "report",
}
"""A package and the one folder under src/rollplex_cli that may import it, lazily or not."""


def imported_packages(path: Path) -> Iterator[tuple[str, int]]:
    """(top-level package, line) of every import of a file, those for type checking included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name.split(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0], node.lineno


def test_the_package_is_found() -> None:
    assert len(SOURCES) > 20


def test_files_are_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in CODE
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_LINES
    }
    assert not long


def test_folders_are_small() -> None:
    folders = {path.parent for path in CODE}
    full = {
        str(folder.relative_to(ROOT)): count
        for folder in folders
        if (count := len(list(folder.glob("*.py")))) > MAX_FILES
    }
    assert not full


def test_nothing_else_stands_at_the_top() -> None:
    names = {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}
    assert names - GENERATED <= TOP_LEVEL


def test_code_is_ascii() -> None:
    texts = [*CODE, *ROOT.glob("profiles/**/*.yaml"), *ROOT.glob("jobs/**/*.yaml")]
    assert not [str(path.relative_to(ROOT)) for path in texts if not path.read_text(encoding="utf-8").isascii()]


@pytest.mark.parametrize(("package", "folder"), ONLY_IMPORTERS.items())
def test_a_package_has_one_importer(package: str, folder: str) -> None:
    offenders = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in SOURCES
        if not path.is_relative_to(PACKAGE / folder)
        for name, line in imported_packages(path)
        if name == package
    ]
    assert not offenders


def test_no_module_imports_tests_or_tools() -> None:
    offenders = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in CODE
        if "tests" not in path.relative_to(ROOT).parts
        for name, line in imported_packages(path)
        if name in {"tests", "tools", "setup_env", "pytest"}
    ]
    assert not offenders


def test_tests_mirror_the_sources() -> None:
    """A folder of tests for a package that is gone tests nothing."""
    allowed = {"golden", "scenarios", "e2e", "tools", "jobs"}
    folders = {
        path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and not path.name.startswith(("_", "."))
    }
    assert folders - allowed <= {path.name for path in PACKAGE.iterdir() if path.is_dir()}
