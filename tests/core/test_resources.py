from __future__ import annotations

from pathlib import Path

import pytest

from rollplex_cli.core import resources


def test_everything_shipped_is_found_from_any_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert {"tiny", "tiny-2rank", "qwen25vl7b", "qwen25vl32b"} <= set(resources.shipped_profiles())
    assert set(resources.model_config_names()) == {
        *("tiny", "tiny-qwen2vl", "tiny-qwen3vl"),
        *("qwen2vl7b", "qwen25vl3b", "qwen25vl7b", "qwen25vl32b", "qwen25vl72b", "qwen3vl4b", "qwen3vl8b"),
    }
    assert resources.shipped_folder("jobs").is_dir()


def test_a_wheel_has_its_files_inside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shipped" / "profiles").mkdir(parents=True)
    (tmp_path / "shipped" / "profiles" / "mine.yaml").touch()
    monkeypatch.setattr(resources, "PACKAGE", tmp_path)
    assert list(resources.shipped_profiles()) == ["mine"]


def test_folders_are_taken_where_there_is_no_such_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert resources.model_config_folder(str(tmp_path)) == tmp_path
    assert resources.model_config_folder("no-such-model") is None
    (tmp_path / "task.py").touch()
    assert resources.task_folder(str(tmp_path)) == tmp_path
    assert resources.task_folder("no-such-task") is None
