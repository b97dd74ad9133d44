"""Finding a task and importing its functions from the folder it lies in."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.resources import shipped_folder, task_folder

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import ModuleType

    from rollplex_cli.data.types import Sample

# Reentrant: a task may build on another one and load it while it is imported itself.
_lock = threading.RLock()


class Task(Protocol):
    """What `task.py` in a task's folder provides, as module-level functions."""

    def prepare(self, data_dir: Path, options: Mapping[str, Any], seed: int) -> None:
        """Write the task's data under `data_dir`. Called once per run; equal arguments give equal data."""

    def samples(self, data_dir: Path, split: str) -> list[Sample]:
        """Rows of the split `train`, `validation` (may end a cold start) or `heldout` (decides nothing)."""

    def reward(self, sample: Sample, text: str, finished: bool) -> Mapping[str, float] | float:
        """Reward of a decoded response, or named parts of it; `finished`: it ended by the end token."""

    def answer_text(self, sample: Sample) -> str:
        """The response a cold start teaches, without the end token."""

    def build_base(self, base_dir: Path, data_dir: Path, config_json: Path, seed: int) -> None:
        """Write a Hugging Face checkpoint folder with random weights of the sizes in `config_json`.

        A task may have `build_shell(base_dir, data_dir, config_json)` besides: the same without weights.
        """


_FUNCTIONS = {
    "prepare": ("data_dir", "options", "seed"),
    "samples": ("data_dir", "split"),
    "reward": ("sample", "text", "finished"),
    "answer_text": ("sample",),
    "build_base": ("base_dir", "data_dir", "config_json", "seed"),
}


def load_task(name_or_path: str) -> Task:
    """Import a task: a folder name under jobs/tasks or a path to a folder with `task.py`.

    The folder is a package: `task.py` imports its neighbours as `from . import clips`. Loading a folder twice
    gives the same module.

    Raises:
        UsageError: no such task, `task.py` does not import, or a function is missing or takes other arguments.
    """
    folder = task_folder(name_or_path)
    if folder is None:
        tasks = shipped_folder("jobs") / "tasks"
        known = sorted(path.parent.name for path in tasks.glob("*/task.py"))
        raise UsageError(
            f"no such task: {name_or_path}", hint=f"tasks that come with the program: {', '.join(known) or 'none'}"
        )
    module = _import(folder)
    for function, arguments in _FUNCTIONS.items():
        _check(module, function, arguments, folder)
    return cast("Task", module)


def _import(folder: Path) -> ModuleType:
    # Two folders of one name are two packages.
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:8]
    package = f"rollplex_task_{re.sub(r'[^0-9a-zA-Z]', '_', folder.name)}_{digest}"
    with _lock:
        if package not in sys.modules:
            spec = ModuleSpec(package, loader=None, is_package=True)
            spec.submodule_search_locations = [str(folder)]
            sys.modules[package] = importlib.util.module_from_spec(spec)
        try:
            return importlib.import_module(f"{package}.task")
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"task does not import ({type(error).__name__}: {error}): {folder}") from error


def _check(module: ModuleType, function: str, arguments: tuple[str, ...], folder: Path) -> None:
    found = getattr(module, function, None)
    if not callable(found):
        raise UsageError(f"task has no function `{function}`: {folder}")
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as error:
        wanted = ", ".join(arguments)
        raise UsageError(f"task function must be callable as `{function}({wanted})` ({error}): {folder}") from None
