from __future__ import annotations

from pathlib import Path

import pytest

from rollplex_cli.cli import options
from rollplex_cli.cli.bench import _halved


def test_relative_paths_do_not_bind_a_run_to_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "task.py").touch()
    source = Path(options.__file__).parents[1] / "plan" / "configs" / "tiny" / "config.json"
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_bytes(source.read_bytes())
    profile, _, _ = options.load("tiny", ["task.name=mine", "model.config=model"])
    assert profile.task.name == str(tmp_path / "mine")
    assert profile.model.config == str(tmp_path / "model")


def test_names_of_what_is_shipped_stay_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shapes").mkdir()
    (tmp_path / "shapes" / "task.py").touch()
    profile, _, _ = options.load("tiny", [])
    assert (profile.task.name, profile.model.config) == ("shapes", "tiny")


def test_the_baseline_of_separate_ranks_shares_no_vision_features() -> None:
    """Which that schedule refuses: the tower that has run is on another rank."""
    overrides = ["reuse.vision=true", "model.freeze_vision=true"]
    profile, _, _ = options.load("tiny-2rank", overrides)
    apart, _, _ = options.load("tiny-2rank", [*overrides, *_halved(profile)])
    assert apart.disaggregated and profile.reuse.vision and not apart.reuse.vision
