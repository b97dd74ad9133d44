"""`rollplex profiles`: list, print and copy the profiles that come with the program."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollplex_cli.cli import options
from rollplex_cli.cli.output import print_json, print_text, set_json_mode, stdout_console
from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.log import talk
from rollplex_cli.core.resources import shipped_profiles

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="List, show and copy profiles.")
NameArgument = Annotated[str, typer.Argument(help="A shipped profile's name, or a YAML file.")]


@app.command("ls")
def ls(as_json: options.JsonOption = False) -> None:
    """List the shipped profiles."""
    from rich.table import Table
    from rich.text import Text

    from rollplex_cli.profile.load import load_profile

    set_json_mode(as_json)
    loaded = [(name, path, load_profile(path)) for name, path in shipped_profiles().items()]
    if as_json:
        print_json([{"name": name, "path": str(path), "description": p.description} for name, path, p in loaded])
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in (("profile", "left"), ("ranks", "right"), ("device", "left"), ("description", "left")):
        table.add_column(column, justify=justify, no_wrap=column != "description")  # type: ignore[arg-type]
    for name, _path, profile in loaded:
        cells = (name, str(profile.num_ranks), profile.topology.device, profile.description)
        table.add_row(*(Text(cell) for cell in cells))
    stdout_console().print(table)


@app.command("show")
def show(
    name: NameArgument,
    resolved: Annotated[bool, typer.Option("--resolved", help="With every default written out.")] = False,
) -> None:
    """Print a profile's YAML."""
    from rollplex_cli.profile.dump import resolved_yaml
    from rollplex_cli.profile.load import find_profile, load_profile

    print_text(resolved_yaml(load_profile(name)) if resolved else find_profile(name).read_text(encoding="utf-8"))


@app.command("copy")
def copy(name: NameArgument, to: Annotated[Path, typer.Argument(help="The new file, or a folder for it.")]) -> None:
    """Copy a profile to edit it."""
    from rollplex_cli.profile.load import find_profile

    source = find_profile(name)
    target = to / source.name if to.is_dir() else to
    if target.exists():
        raise UsageError(f"the file exists: `{target}`")
    try:
        target.write_bytes(source.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot write `{target}`: {error.strerror}") from error
    talk(f"train with it: rollplex train --profile {target}")
