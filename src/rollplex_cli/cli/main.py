"""The `rollplex` program: one file per command, one place that turns errors into exit codes."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from rollplex_cli.cli import bench, export, profile_memory, profiles, report, train
from rollplex_cli.cli.jobs import cancel, check, logs, status, submit
from rollplex_cli.cli.output import report_error, report_unexpected
from rollplex_cli.core.errors import InterruptedRunError, RollplexError, UsageError

CLICK_ERROR: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")
"""Base of the argument parser's errors, which typer took from click and later brought along itself."""

PARSER_INTERRUPTED = 130
"""What the argument parser makes of a KeyboardInterrupt, in versions that do not raise Abort."""

app = typer.Typer(
    name="rollplex",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Post-training of vision-language models by reinforcement learning, rollout and training overlapped.",
    epilog="Exit codes: 0 done, 1 run failed, 2 usage or profile, 3 does not fit, 4 cluster, 5 target not reached, "
    "75 interrupted with a checkpoint to resume.",
)
app.command("train")(train.train)
app.command("bench")(bench.bench)
app.command("check")(check.check)
app.command("submit")(submit.submit)
app.command("status")(status.status)
app.command("logs")(logs.logs)
app.command("cancel")(cancel.cancel)
app.command("report")(report.report)
app.command("export")(export.export)
app.command("profile-memory")(profile_memory.profile_memory)
app.add_typer(profiles.app, name="profiles")


def _version(show: bool) -> None:
    if show:
        try:
            typer.echo(f"rollplex {version('rollplex')}")
        except PackageNotFoundError:
            typer.echo("rollplex (not installed)")
        raise typer.Exit


@app.callback()
def root(
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before the command."""


def main(arguments: list[str] | None = None) -> None:
    """Run the program and exit with the code of what happened."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run the program; returns the exit code. No exception leaves it, no traceback reaches the terminal."""
    try:
        result = app(arguments, prog_name="rollplex", standalone_mode=False)
    except RollplexError as error:
        return report_error(error)
    except (KeyboardInterrupt, typer.Abort):
        return report_error(InterruptedRunError("interrupted"))
    except CLICK_ERROR as error:
        return _parser_error(error)
    except BrokenPipeError:
        # The reader of our output has gone, as `rollplex ... | head` does.
        return 0
    except Exception as error:
        return report_unexpected(error)
    if result == PARSER_INTERRUPTED:
        return report_error(InterruptedRunError("interrupted"))
    return result if isinstance(result, int) else 0


def _parser_error(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError" and context is not None:
        print(context.get_help())
        return 0
    path = context.command_path if context is not None else "rollplex"
    formatted = getattr(error, "format_message", error.__str__)
    text: str = formatted()
    return report_error(UsageError(text.strip().rstrip("."), hint=f"`{path} --help` lists what it takes"))


if __name__ == "__main__":
    main()
