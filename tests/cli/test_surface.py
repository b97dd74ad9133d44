"""Options are what users have in their scripts: a change here is a change of the product."""

from __future__ import annotations

import typer

from rollplex_cli.cli.main import app

SHARED = {"--profile", "-p", "--set", "--json"}
OPTIONS = {
    "": {"--version", "--help"},
    "train": SHARED | {"--run-dir", "--resume", "--max-steps", "--schedule", "--plain"},
    "bench": SHARED | {"--run-dir", "--baseline", "--steps", "--workload", "--policy", "--ablate", "--plain"},
    "check": SHARED | {"--site", "--samples", "--no-data"},
    "submit": SHARED
    | {
        "--slurm",
        "--site",
        "--grid",
        "--run-dir",
        "--resume",
        "--dry-run",
        "--no-data",
        "--samples",
        "--nodes",
        "--time",
    }
    | {"--account", "--partition", "--qos", "--constraint", "--exclude", "--reservation", "--gres", "--dependency"}
    | {"--stop-lead", "--max-requeues", "--setup", "--env", "--sbatch"},
    "status": {"run", "--json"},
    "logs": {"run", "--follow", "-f", "--rank", "--lines", "-n"},
    "cancel": {"run", "--now"},
    "report": {"run", "--json"},
    "export": {"run", "--to", "--best", "--merge", "--json"},
    "profile-memory": SHARED | {"--weights", "--ablate", "--plot", "--samples", "--measure", "--run-dir"},
    "profiles": set(),
    "profiles ls": {"--json"},
    "profiles show": {"name", "--resolved"},
    "profiles copy": {"name", "to"},
}


def surface() -> dict[str, set[str]]:
    """Command path to its options and arguments."""
    found: dict[str, set[str]] = {}

    def visit(command: object, path: str) -> None:
        params = getattr(command, "params", [])
        found[path] = {name for param in params for name in (*param.opts, *param.secondary_opts)}
        for name, below in getattr(command, "commands", {}).items():
            visit(below, f"{path} {name}".strip())

    visit(typer.main.get_command(app), "")
    return found


def test_surface() -> None:
    found = surface()
    # The parser adds `--help` itself, to some commands only when asked.
    assert {path: names - {"--help"} for path, names in found.items()} == {
        path: names - {"--help"} for path, names in OPTIONS.items()
    }
