"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "error", "skipped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    name: str
    level: Level
    text: str
    details: tuple[str, ...] = ()
    """One line each."""
    exit_code: int = 2
    """What the program ends with on account of an error."""


def ok(name: str, text: str, *details: str) -> Finding:
    """Nothing wrong."""
    return Finding(name=name, level="ok", text=text, details=details)


def warning(name: str, text: str, *details: str) -> Finding:
    """Doubtful, not wrong."""
    return Finding(name=name, level="warning", text=text, details=details)


def skipped(name: str, text: str) -> Finding:
    """Could not be checked here."""
    return Finding(name=name, level="skipped", text=text)


def error(name: str, text: str, *details: str, exit_code: int = 2) -> Finding:
    """The job would fail."""
    return Finding(name=name, level="error", text=text, details=details, exit_code=exit_code)


def exit_code_of(findings: list[Finding]) -> int:
    """0 without errors, else the code of the first one."""
    return next((finding.exit_code for finding in findings if finding.level == "error"), 0)
