"""Where the files that come with the program are: profiles, jobs and bundled model configurations.

In a wheel they lie inside the package (`shipped/`); in a checkout they are the folders at its root.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = PACKAGE.parents[1]


def shipped_folder(kind: Literal["profiles", "jobs"]) -> Path:
    """The folder `profiles` or `jobs` that came with this installation."""
    inside = PACKAGE / "shipped" / kind
    return inside if inside.is_dir() else CHECKOUT / kind


def shipped_profiles() -> dict[str, Path]:
    """Every shipped profile: name (file name without `.yaml`) to path, sorted by name."""
    folder = shipped_folder("profiles")
    return {path.stem: path for path in sorted(folder.rglob("*.yaml"), key=lambda path: path.stem)}


def shipped_sites() -> dict[str, Path]:
    """Every shipped site: name (file name without `.yaml`) to path, sorted by name."""
    return {path.stem: path for path in sorted((shipped_folder("jobs") / "sites").glob("*.yaml"))}


def task_folder(name: str) -> Path | None:
    """The folder of a task: a shipped one by name, else `name` as a path; None where there is no `task.py`."""
    for folder in (shipped_folder("jobs") / "tasks" / name, Path(name)):
        if (folder / "task.py").is_file():
            return folder.resolve()
    return None


def model_config_names() -> list[str]:
    """Names of the bundled model configurations, sorted."""
    return sorted(path.parent.name for path in (PACKAGE / "plan" / "configs").glob("*/config.json"))


def model_config_folder(name: str) -> Path | None:
    """The folder with `config.json` for a bundled name or a checkpoint folder; None where there is none."""
    for folder in (PACKAGE / "plan" / "configs" / name, Path(name)):
        if (folder / "config.json").is_file():
            return folder
    return None
