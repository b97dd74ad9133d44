"""Loading tasks from folders, and the faults of a task's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex_cli.core.errors import UsageError
from rollplex_cli.data.tasks import load_task

COMPLETE = """
from .words import WORD
def prepare(data_dir, options, seed): pass
def samples(data_dir, split): return []
def reward(sample, text, finished): return 1.0
def answer_text(sample): return WORD
def build_base(base_dir, data_dir, config_json, seed): pass
"""


def make(folder: Path, task: str = COMPLETE, word: str = "left") -> str:
    folder.mkdir(parents=True)
    (folder / "task.py").write_text(task, encoding="utf-8")
    (folder / "words.py").write_text(f"WORD = {word!r}\n", encoding="utf-8")
    return str(folder)


def test_shipped_tasks_load_by_name() -> None:
    assert load_task("shapes") is load_task("shapes")


def test_folders_of_one_name_keep_their_own_neighbours(tmp_path: Path) -> None:
    one = load_task(make(tmp_path / "a" / "my task"))
    two = load_task(make(tmp_path / "b" / "my task", word="right"))
    assert one.answer_text(None) == "left"  # type: ignore[arg-type]
    assert two.answer_text(None) == "right"  # type: ignore[arg-type]


def test_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match="no such task: shaeps") as caught:
        load_task("shaeps")
    assert caught.value.hint is not None
    assert "shapes" in caught.value.hint


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError"),
        ("def prepare(:", "SyntaxError"),
        (COMPLETE.replace("def reward", "def rewards"), "no function `reward`"),
        (COMPLETE.replace("text, finished", "text"), r"callable as `reward\(sample, text, finished\)`"),
    ],
)
def test_faults_of_a_task_are_named(tmp_path: Path, task: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        load_task(make(tmp_path / "faulty", task))
    assert str(tmp_path) in caught.value.message
