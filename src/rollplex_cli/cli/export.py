"""`rollplex export`: a run's weights as a Hugging Face checkpoint, or its adapters in PEFT's form."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from rollplex_cli.cli import options
from rollplex_cli.cli.output import print_json, set_json_mode
from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.log import talk

EXPORT = "rollplex_cli.runtime.export"


def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    to: Annotated[Path, typer.Option("--to", help="Folder to write; new or empty.")],
    best: Annotated[bool, typer.Option("--best", help="The best held-out checkpoint, not the newest.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Merge LoRA adapters into their base.")] = False,
    as_json: options.JsonOption = False,
) -> None:
    """Write a run's newest weights (or its best ones) as a Hugging Face checkpoint; LoRA adapters as a PEFT folder,
    unless they are merged."""
    from rollplex_cli.launch.run_folder import reopen_run
    from rollplex_cli.launch.supervise import run_child
    from rollplex_cli.launch.torchrun import worker_env
    from rollplex_cli.profile.load import load_profile

    set_json_mode(as_json)
    folder = reopen_run(run)
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UsageError(f"the folder exists and is not empty: `{to}`", hint="choose another `--to`")
    profile = load_profile(folder.profile)
    if merge and profile.lora is None:
        raise UsageError(f"the run trained no adapters, there is nothing to merge: `{run}`", hint="drop `--merge`")
    argv = [sys.executable, "-m", EXPORT, str(folder.root.resolve()), "--to", str(to.resolve())]
    argv += [*(["--best"] if best else []), *(["--merge"] if merge else [])]
    run_child(argv, folder, worker_env(profile, os.environ), what="export")
    kind = "adapter" if profile.lora is not None and not merge else "checkpoint"
    if as_json:
        print_json({"run_dir": str(run), kind: str(to)})
    else:
        talk(f"{kind}: {to}")
