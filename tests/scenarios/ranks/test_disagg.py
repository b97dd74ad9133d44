"""`schedule.name: disagg`: half of the ranks decode, the other half train, and the results are those of one rank."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from scenarios.support import ALONE, go_on, metrics, rollplex, sets, small, train

from rollplex_cli.core.files import read_jsonl
from rollplex_cli.core.names import TaskKind
from rollplex_cli.core.paths import RunFolder

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(600)]
STEPS = 6
CHECKED = "guards.check_publish=true"
TWO, FOUR = "topology.ranks_per_node=2", "topology.ranks_per_node=4"
RESULTS = ("step", "loss", "grad_norm", "reward_mean", "reward_std", "kl", "logprob_diff_mean", "response_tokens_mean")


def job(prepared: RunFolder, *overrides: str) -> list[str]:
    base = ("model.init=checkpoint", f"model.config={prepared.base_dir}", *ALONE, f"runtime.max_steps={STEPS}", CHECKED)
    return [*base, *overrides]


def command(root: Path, prepared: RunFolder, *overrides: str) -> subprocess.CompletedProcess[str]:
    given = ["--run-dir", str(root), "--plain", "--schedule", "disagg", *sets(small(*job(prepared, *overrides)))]
    return rollplex("train", "--profile", "tiny", *given, timeout_s=300)


def results(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in RESULTS} for row in rows]


def test_one_rank_decodes_and_one_trains(prepared: RunFolder, alone: RunFolder, tmp_path: Path) -> None:
    """Through the real command line. Bit-equal to one rank: the same batches in both engines."""
    root = tmp_path / "disagg"
    done = command(root, prepared, TWO, "runtime.checkpoint_every=2")
    assert done.returncode == 0, done.stderr[-3000:]
    found = results(metrics(root))
    assert found == results(metrics(alone.root))[:STEPS]
    assert len({row["loss"] for row in found}) == STEPS  # it learns something: no comparison of zeros
    evaluations = list(read_jsonl(RunFolder(root).evaluations))
    assert [row["step"] for row in evaluations] == [0, STEPS]
    assert evaluations == list(read_jsonl(alone.evaluations))[:2]
    trained, decoded = (kinds(root, rank) for rank in (0, 1))
    assert {TaskKind.ACTOR_SUFFIX, TaskKind.REF_PREFIX, TaskKind.UPDATE, TaskKind.EXCHANGE} <= trained
    assert decoded & set(TaskKind) == {TaskKind.DECODE, TaskKind.EXCHANGE, TaskKind.PUBLISH}
    assert TaskKind.DECODE not in trained
    # A run that is resumed goes on to the same numbers.
    for step in (4, 6):
        shutil.rmtree(root / "checkpoints" / f"step-{step:06d}")
    assert results(go_on(root)) == found


def kinds(root: Path, rank: int) -> set[str]:
    return {str(span.get("name")) for span in read_jsonl(RunFolder(root).events(rank))}


def test_two_replicas_decode_for_two_training_shards(prepared: RunFolder, alone: RunFolder, tmp_path: Path) -> None:
    """Rollout shards hold two training shards each, some of whose parts are columns."""
    degrees = (FOUR, "topology.train_tp=2", "schedule.name=disagg")
    found = train(tmp_path / "four", *job(prepared, *degrees, "runtime.max_steps=3"))
    for one, other in zip(found, metrics(alone.root), strict=False):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-4), one["step"]
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3), one["step"]
        assert one["reward_mean"] == pytest.approx(other["reward_mean"], abs=1e-9), one["step"]
        assert one["response_tokens_mean"] == other["response_tokens_mean"]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["topology.ranks_per_node=3"], "expected an even number of ranks with `schedule.name: disagg`"),
        ([TWO, "topology.train_tp=2"], "2 ranks, 1 of them train, 1 / train_tp 2 = 0.50 training groups"),
        ([TWO, "rollout.extra_groups=1"], "expected 0 with `schedule.name: disagg`"),
    ],
)
def test_degrees_that_do_not_fit_are_named(
    prepared: RunFolder, tmp_path: Path, overrides: list[str], text: str
) -> None:
    done = command(tmp_path / "run", prepared, *overrides)
    assert done.returncode == 2
    assert text in done.stderr
