"""A small job for scenario tests: real engines, real clips, random weights."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import warm

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.launch.torchrun import PREPARE, WORKER

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rollplex_cli.runtime.assembly.rank import Rank

HERE = Path(__file__).parent
SMALL = (
    f"task.name={HERE / 'noise_task'}",
    "task.options.num_train_clips=12",
    "task.options.num_validation_clips=4",
    "task.options.num_eval_clips=6",
    "model.init=random",
    "algorithm.prompts_per_step=4",
    "rollout.group_size=4",
    "evaluation.num_samples=0",
    "optimizer.warmup_steps=0",
    "runtime.checkpoint_every=0",
    "data.num_workers=0",
    "target=null",
    "logging.pictures=false",
)

ALONE_STEPS = 20
ALONE = (
    f"runtime.max_steps={ALONE_STEPS}",
    "runtime.checkpoint_every=4",
    "runtime.keep_checkpoints=9",
    # Clipping is off: a norm that differs in its last digit would scale the whole update.
    "optimizer.clip_norm=100.0",
    "rollout.max_new_tokens=6",
    "algorithm.kl_coef=0.05",
    "evaluation.num_samples=4",
    "evaluation.every_steps=6",
)
"""What the fixture `alone` sets on top of SMALL; other topologies, schedules and restarts must give its numbers."""


def small(*more: str) -> list[str]:
    """`--set` overrides of the `tiny` profile for a job of about 0.2 s a step."""
    return [*SMALL, *more]


def prepare_run(root: Path, source: RunFolder | None, *overrides: str) -> RunFolder:
    """A prepared run folder; base and data are copied from `source` where there is one."""
    from rollplex_cli.profile.dump import resolved_yaml
    from rollplex_cli.profile.load import load_profile
    from rollplex_cli.runtime.prepare import prepare

    run = RunFolder(root)
    run.make()
    run.profile.write_text(resolved_yaml(load_profile("tiny", small(*overrides))), encoding="utf-8")
    if source is not None:
        adopt(run, source)
    prepare(run)
    return run


def adopt(run: RunFolder, source: RunFolder) -> None:
    """Take over base and data of a prepared run."""
    shutil.rmtree(run.data_dir, ignore_errors=True)
    shutil.copytree(source.data_dir, run.data_dir)
    if not run.base_dir.exists():
        shutil.copytree(source.base_dir, run.base_dir)


@contextlib.contextmanager
def open_test_rank(run: RunFolder, rank_id: int = 0) -> Iterator[Rank]:
    """A rank of the run with its real engines, in this process."""
    from rollplex_cli.runtime.assembly.build import open_control, open_rank

    with open_control(run, rank_id) as (control, machine), open_rank(run, control, machine) as rank:
        yield rank


def rollplex(
    *arguments: str, env: dict[str, str] | None = None, timeout_s: float = 240.0, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the real command line."""
    return subprocess.run(
        [sys.executable, "-m", "rollplex_cli.cli.main", *arguments],
        capture_output=True, text=True, timeout=timeout_s, cwd=cwd, check=False,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200", **(env or {})},
    )  # fmt: skip


def train(root: Path, *overrides: str, profile: str = "tiny") -> list[dict[str, Any]]:
    """A run without command line and torchrun: what these start, in forks of one process. Returns its metrics.

    For what is about numbers; the command line costs several times as much.
    """
    from rollplex_cli.profile.dump import resolved_yaml
    from rollplex_cli.profile.load import load_profile

    run = RunFolder(root)
    run.make()
    run.profile.write_text(resolved_yaml(load_profile(profile, small(*overrides))), encoding="utf-8")
    prepared = warm.run([["-m", PREPARE, root]])[0]
    assert prepared.returncode == 0, run.prepare_log.read_text()[-3000:]
    return go_on(root)


def go_on(root: Path, timeout_s: float = 280.0) -> list[dict[str, Any]]:
    """The same for a run folder as it is, from its newest checkpoint where it has one."""
    from rollplex_cli.launch.run_folder import begin_start
    from rollplex_cli.profile.load import load_profile

    run = RunFolder(root)
    begin_start(run)
    num_ranks = load_profile(run.profile).num_ranks
    done = warm.run_ranks(["-m", WORKER, root], num_ranks, timeout_s)
    logs = [run.rank_log(rank).read_text()[-3000:] for rank in range(num_ranks)]
    assert [rank.returncode for rank in done] == [0] * num_ranks, "\n".join(logs)
    return metrics(root)


def metrics(root: Path) -> list[dict[str, Any]]:
    """A run's rows, one a step."""
    return [json.loads(line) for line in RunFolder(root).metrics.read_text(encoding="utf-8").splitlines()]


def run_script(script: Path, *arguments: object, timeout_s: float = 280.0) -> tuple[dict[str, Any], str]:
    """Run a script in a process of its own: the JSON object on its last line of output, and its stderr."""
    [found] = run_script_on_ranks(1, script, *arguments, timeout_s=timeout_s)
    return found


def run_script_on_ranks(
    num_ranks: int, script: Path, *arguments: object, timeout_s: float = 280.0
) -> list[tuple[dict[str, Any], str]]:
    """As `run_script` in a process for each rank, with the variables that torchrun sets for several."""
    program = [script, *arguments]
    done = warm.run_ranks(program, num_ranks, timeout_s) if num_ranks > 1 else warm.run([program], timeout_s=timeout_s)
    for rank in done:
        assert rank.returncode == 0, rank.stderr[-3000:]
    return [(dict(json.loads(rank.stdout.strip().splitlines()[-1])), rank.stderr) for rank in done]


def sets(overrides: Sequence[str]) -> list[str]:
    """`--set` arguments."""
    return [part for override in overrides for part in ("--set", override)]
