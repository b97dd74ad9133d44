from __future__ import annotations

from pathlib import Path
from typing import Any

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.profile.load import load_profile
from rollplex_cli.runtime.prepare import _build_base


def test_a_base_that_was_moved_is_linked_anew(tmp_path: Path) -> None:
    run, task = RunFolder(tmp_path / "run"), None
    run.make()
    run.base_dir.symlink_to(tmp_path / "where it was")
    new = tmp_path / "where it is"
    new.mkdir()
    (new / "config.json").write_text("{}")
    profile = load_profile("tiny", ["model.init=checkpoint", f"model.config={new}"])
    unused: Any = task
    assert _build_base(run, profile, unused) is None
    assert run.base_dir.resolve() == new
