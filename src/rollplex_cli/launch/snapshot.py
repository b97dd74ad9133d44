"""A copy of the program and the task in the run folder: what a submitted run runs, whatever is edited later."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.resources import PACKAGE, shipped_folder, task_folder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollplex_cli.core.paths import RunFolder
    from rollplex_cli.profile.schema import Profile

IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc", ".*")
SHIPPED = "shipped"


def snapshot(run: RunFolder, profiles: Sequence[Profile]) -> list[Profile]:
    """Copy what runs need into `code/`; returns the profiles with their paths made independent of later edits.

    A task that lies outside the program and files of reward functions are copied, too. A model's folder is not: it is
    data, and large.

    Args:
        run: the run folder; of an array, the folder of its runs' folders.
        profiles: of every run.

    Raises:
        UsageError: the copy cannot be written.
    """
    package = run.code_dir / PACKAGE.name
    try:
        _copy(PACKAGE, package)
        # As in a wheel: the program finds profiles and tasks inside its own package.
        for kind in ("profiles", "jobs"):
            _copy(shipped_folder(kind), package / SHIPPED / kind)
        rewards = _own_rewards(run, {part for profile in profiles for part in profile.reward.parts})
        tasks = {name: _own_task(run, name) for name in {profile.task.name for profile in profiles}}
    except OSError as error:
        raise UsageError(f"cannot copy the program into the run folder: {error}") from error
    return [_with_copies(profile, tasks[profile.task.name], rewards) for profile in profiles]


def _with_copies(profile: Profile, task: str, rewards: Mapping[str, str]) -> Profile:
    parts = {rewards.get(name, name): weight for name, weight in profile.reward.parts.items()}
    model = profile.model
    folder = Path(model.config).expanduser()
    if (folder / "config.json").is_file():
        model = dataclasses.replace(model, config=str(folder.resolve()))
    return dataclasses.replace(
        profile,
        task=dataclasses.replace(profile.task, name=task),
        reward=dataclasses.replace(profile.reward, parts=parts),
        model=model,
    )


def _own_task(run: RunFolder, name: str) -> str:
    found = task_folder(name)
    shipped = shipped_folder("jobs") / "tasks"
    if found is None or found.is_relative_to(shipped.resolve()):
        return name
    target = run.code_dir / "tasks" / found.name
    _copy(found, target)
    return str(target.resolve())


def _own_rewards(run: RunFolder, names: set[str]) -> dict[str, str]:
    """`file.py:function` to the same in the copy. A file may import its neighbours, so they come along."""
    copies = {}
    for name in sorted(names):
        path, _, function = name.rpartition(":")
        source = Path(path)
        if source.suffix != ".py" or not source.is_file():
            continue
        folder = run.code_dir / "rewards" / hashlib.sha256(str(source.resolve().parent).encode()).hexdigest()[:8]
        folder.mkdir(parents=True, exist_ok=True)
        for neighbour in source.resolve().parent.glob("*.py"):
            shutil.copy(neighbour, folder)
        copies[name] = f"{(folder / source.name).resolve()}:{function}"
    return copies


def _copy(source: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target, ignore=IGNORED)
