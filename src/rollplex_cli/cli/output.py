"""How every command speaks: stdout is data, stderr is talk, faults are `error:` and `hint:` lines."""

from __future__ import annotations

import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import RollplexError
from rollplex_cli.core.log import talk

if TYPE_CHECKING:
    from rich.console import Console

_json_mode = False


def set_json_mode(on: bool) -> None:
    """Whether the command was asked for JSON: its errors then are JSON on stdout, too."""
    global _json_mode
    _json_mode = on


def stdout_console() -> Console:
    """A console for tables that are the command's data."""
    from rich.console import Console

    return Console()


def stderr_console() -> Console:
    """A console for progress and summaries."""
    from rich.console import Console

    return Console(stderr=True)


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2), flush=True)


def print_text(text: str) -> None:
    """Text on stdout exactly as it is: no markup, no wrapping."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()


def report_error(error: RollplexError) -> int:
    """Tell the user about a fault; returns the exit code."""
    talk(f"error: {printable(error.message)}")
    if error.hint:
        talk(f"hint: {printable(error.hint)}")
    if _json_mode:
        print_json({"error": error.message, "hint": error.hint, "exit_code": error.exit_code})
    return error.exit_code


def report_unexpected(error: BaseException) -> int:
    """Save the traceback of an error nobody foresaw and say where it is; returns the exit code."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="rollplex-traceback-", suffix=".txt", delete=False, encoding="utf-8"
    ) as stream:
        stream.write("".join(traceback.format_exception(error)))
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return report_error(RollplexError(f"unexpected {text}", hint=f"the traceback is in `{Path(stream.name)}`"))


def printable(text: str) -> str:
    """Text without terminal control codes; messages quote files, logs and model output."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
