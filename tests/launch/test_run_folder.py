from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from rollplex_cli.core.errors import UsageError
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.launch import run_folder
from rollplex_cli.launch.run_folder import (
    begin_start,
    create_run,
    default_run_dir,
    git_revision,
    lock_run,
    reopen_run,
    resume_run,
)

ARGV = ["rollplex", "train", "--set", "name=a b"]


def make(root: Path) -> RunFolder:
    return create_run(root, profile_yaml="name: x\n", plan_json="{}\n", argv=ARGV)


def test_new_folder_describes_the_run(tmp_path: Path) -> None:
    run = make(tmp_path / "deep" / "a run's folder")
    assert run.profile.read_text() == "name: x\n"
    assert run.plan.read_text() == "{}\n"
    assert shlex.split(run.command.read_text()) == ARGV
    assert re.fullmatch(r"([0-9a-f]{40}(-dirty)?|unknown)\n", run.git.read_text())
    for folder in (run.logs_dir, run.events_dir, run.status_dir, run.checkpoints_dir, run.rollouts_dir):
        assert folder.is_dir()


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    make(tmp_path / "run")
    with pytest.raises(UsageError, match="the run folder exists: `.*run`") as caught:
        make(tmp_path / "run")
    assert caught.value.hint == "choose another `--run-dir`; a training run is continued with `rollplex train --resume`"
    assert caught.value.exit_code == 2


def test_an_empty_folder_may_be_used_and_a_file_not(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    make(tmp_path / "empty")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot make the run folder"):
        make(tmp_path / "file")


def test_resuming_keeps_results_and_adds_the_command(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    run.metrics.write_text('{"step": 0}\n')
    resume_run(reopen_run(run.root), profile_yaml="name: y\n", plan_json="{}\n", argv=["rollplex", "train", "--resume"])
    assert run.profile.read_text() == "name: y\n"
    assert run.metrics.read_text() == '{"step": 0}\n'
    assert len(run.command.read_text().splitlines()) == 2


def test_a_folder_without_a_profile_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="not a run folder"):
        reopen_run(tmp_path)


def test_one_supervisor_at_a_time(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    lock = lock_run(run)
    with pytest.raises(UsageError, match="another process is running in this folder"):
        lock_run(run)
    lock.release()
    lock_run(run).release()


def test_statuses_of_an_earlier_start_go_and_the_preparation_s_stays(tmp_path: Path) -> None:
    run = make(tmp_path / "run")
    run.status(0).touch()
    run.prepare_status.touch()
    run.rank_log(0).write_text("old words\n")
    begin_start(run)
    assert run.rank_log(0).read_text().startswith("old words\n=== resumed 2")
    assert list(run.status_dir.iterdir()) == [run.prepare_status]


def test_default_folders_never_collide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda _format: "20260102-030405")
    first = default_run_dir(tmp_path, "tiny")
    assert first == tmp_path / "tiny-20260102-030405"
    first.mkdir()
    assert default_run_dir(tmp_path, "tiny") == tmp_path / "tiny-20260102-030405-2"


def test_an_installed_wheel_has_no_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "CHECKOUT", tmp_path)
    assert git_revision() == "unknown"
