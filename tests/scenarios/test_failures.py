"""Bad input and failing parts, through the real command line: a clear message, the right exit code, nothing lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from scenarios.support import rollplex, sets, small

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.status import read_status

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(300)]


@pytest.fixture
def train(prepared: RunFolder, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs the small job in `tmp_path`/run with more overrides."""

    def run(*more: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        base = ("model.init=checkpoint", f"model.config={prepared.base_dir}", "runtime.max_steps=2")
        arguments = ["train", "--profile", "tiny", "--run-dir", str(tmp_path / "run"), "--plain"]
        done = rollplex(*arguments, *sets(small(*base, *more)), env=env)
        assert "Traceback" not in done.stderr + done.stdout
        return done

    return run


Train = "Callable[..., subprocess.CompletedProcess[str]]"


def test_unknown_key_and_no_tokens_are_named_together(train: Train) -> None:
    done = train("rollout.temprature=0.7", "rollout.max_new_tokens=0")
    assert done.returncode == 2
    assert "rollout.temprature: unknown key, did you mean `temperature`?" in done.stderr
    assert "rollout.max_new_tokens: got 0" in done.stderr


def test_a_group_of_one_is_refused(train: Train) -> None:
    done = train("rollout.group_size=1")
    assert done.returncode == 2
    assert "rollout.group_size" in done.stderr
    assert "at least two responses" in done.stderr


def test_a_reward_function_that_raises_is_named_with_the_sample(train: Train) -> None:
    done = train(env={"ROLLPLEX_TEST_REWARD": "raise"})
    assert done.returncode == 1
    assert "reward function `reward` of sample `train-" in done.stderr
    assert "KeyError" in done.stderr


def test_all_zero_rewards_stop_the_run(train: Train) -> None:
    done = train("guards.zero_reward_steps=2", "runtime.max_steps=6", env={"ROLLPLEX_TEST_REWARD": "zero"})
    assert done.returncode == 1
    assert "every reward was zero for 2 steps in a row" in done.stderr


def test_a_stuck_reward_function_is_named(train: Train) -> None:
    started = time.monotonic()
    done = train("runtime.stall_timeout_s=8", env={"ROLLPLEX_TEST_REWARD": "hang"})
    assert done.returncode == 1
    assert re.search(r"the reward function has not returned for \d+ s: `reward\[\d\]` of step 1", done.stderr)
    assert "host lane: `reward[" in done.stderr
    assert time.monotonic() - started < 240


def test_rollout_and_trainer_that_disagree_stop_the_run_before_the_update(train: Train, tmp_path: Path) -> None:
    done = train("guards.parity_limit=1e-12")
    assert done.returncode == 1
    assert "rollout and trainer log-probs differ by" in done.stderr
    assert "`train-" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_bad_media_are_named(alone: RunFolder, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    shutil.copytree(alone.root, run.root, symlinks=True)
    clips = list((run.data_dir / "train").glob("*.mp4"))
    for content in (b"\x00\x00\x00\x18ftypmp42 this is no video", None):
        for clip in clips:
            clip.unlink()
            if content is not None:
                clip.write_bytes(content)
        done = rollplex("train", "--resume", "--run-dir", str(run.root), "--plain", "--max-steps", "22")
        assert done.returncode == 2
        assert "sample `train-" in done.stderr
        assert ".mp4" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_prompt_over_the_limit_is_named_with_both_numbers(train: Train) -> None:
    done = train("data.max_prompt_tokens=64")
    assert done.returncode == 2
    assert "prompt has 92 tokens" in done.stderr
    assert "`data.max_prompt_tokens`" in done.stderr


def test_an_existing_run_folder_is_not_touched(train: Train, tmp_path: Path) -> None:
    keep = tmp_path / "run" / "profile.yaml"
    keep.parent.mkdir()
    keep.write_text("mine")
    done = train()
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert keep.read_text() == "mine"


def test_a_port_in_use_is_a_cluster_fault(train: Train) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = train(f"runtime.master_port={port}")
    assert done.returncode == 4
    assert str(port) in done.stderr


def test_no_compiler_is_needed(train: Train, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    compilers = re.compile(r"(.*-)?(cc|gcc|g\+\+|c\+\+|clang.*|ninja|nvcc|cmake|as|ld)(-[0-9.]+)?$")
    for program in (p for folder in ("/usr/bin", "/bin") for p in Path(folder).iterdir()):
        if not compilers.match(program.name) and not (tools / program.name).exists():
            (tools / program.name).symlink_to(program)
    assert shutil.which("gcc", path=str(tools)) is None
    done = train("runtime.max_steps=1", env={"PATH": str(tools), "CC": "/nonexistent", "CXX": "/nonexistent"})
    assert done.returncode == 0, done.stderr[-1500:]


def test_responses_with_markup_and_escapes_are_shown_as_text(alone: RunFolder, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    shutil.copytree(alone.root, run.root, symlinks=True)
    path = run.rollouts_dir / "rank0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    hostile = "[/answer][red]x[/red] \x1b[31m [link=file:///]"
    path.write_text("".join(json.dumps({**row, "response": hostile}) + "\n" for row in rows))
    shown = rollplex("report", str(run.root))
    assert shown.returncode == 0, shown.stderr
    assert "[/answer][red]x[/red]" in shown.stdout
    assert "\x1b[31m" not in shown.stdout


def test_a_dead_rank_of_two_ends_the_other_within_the_limit(prepared: RunFolder, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    overrides = small("model.init=checkpoint", f"model.config={prepared.base_dir}", "runtime.max_steps=100")
    command = ["train", "--profile", "tiny-2rank", "--run-dir", str(run.root), "--plain", *sets(overrides)]
    process = subprocess.Popen(
        [sys.executable, "-m", "rollplex_cli.cli.main", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env={**os.environ, "NO_COLOR": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not run.metrics.exists() or len(run.metrics.read_text().splitlines()) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    status = read_status(run.status(1))
    assert status is not None and status.pid is not None
    os.kill(status.pid, signal.SIGKILL)
    killed = time.monotonic()
    output = process.communicate(timeout=90)[0]
    assert time.monotonic() - killed < 60
    assert process.returncode == 1
    assert "rank 1" in output and "Traceback" not in output
