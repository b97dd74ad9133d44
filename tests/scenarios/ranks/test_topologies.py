"""Tensor and data parallelism: the results of one rank, whatever the degrees."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest
from scenarios.support import ALONE, ALONE_STEPS, go_on, metrics, rollplex, sets, small, train

if TYPE_CHECKING:
    import subprocess
    from pathlib import Path

    from rollplex_cli.core.paths import RunFolder

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(600)]
CHECKED = "guards.check_publish=true"
TWO, FOUR = "topology.ranks_per_node=2", "topology.ranks_per_node=4"


def job(prepared: RunFolder, *overrides: str) -> list[str]:
    base = ("model.init=checkpoint", f"model.config={prepared.base_dir}", *ALONE, "evaluation.num_samples=0", CHECKED)
    return [*base, *overrides]


def command(root: Path, prepared: RunFolder, *overrides: str) -> subprocess.CompletedProcess[str]:
    given = sets(small(*job(prepared, *overrides)))
    return rollplex("train", "--profile", "tiny", "--run-dir", str(root), "--plain", *given, timeout_s=300)


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]], steps: int) -> None:
    assert [row["step"] for row in found] == list(range(1, steps + 1))
    for row, other in zip(found, expected, strict=False):
        assert row["reward_mean"] == pytest.approx(other["reward_mean"], abs=1e-9), row["step"]
        assert row["loss"] == pytest.approx(other["loss"], abs=1e-4), row["step"]
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3), row["step"]
        assert row["logprob_diff_max"] < 1e-4
        assert row["response_tokens_mean"] == other["response_tokens_mean"]


def test_train_2_over_rollout_1_gives_the_losses_of_one_rank(
    prepared: RunFolder, alone: RunFolder, tmp_path: Path
) -> None:
    """Twenty steps; two replicas share out the decoding. Then the other way: what two ranks saved, one resumes, and
    what one saved, two resume as one shard of two."""
    kept = metrics(alone.root)
    same(train(tmp_path / "plain", *job(prepared, "topology.train_tp=2", TWO)), kept, ALONE_STEPS)
    assert kept[-1]["kl"] > 0
    rollouts = tmp_path / "plain" / "rollouts"
    assert [path.name for path in rollouts.iterdir()] == ["rank0.jsonl"]  # one rank speaks for the training group
    assert len((rollouts / "rank0.jsonl").read_text().splitlines()) == ALONE_STEPS * 16
    for source, root, more in (
        (alone.root, tmp_path / "to_two", (TWO, "topology.train_tp=2", "topology.rollout_tp=2")),
        (tmp_path / "plain", tmp_path / "to_one", ()),
    ):
        shutil.copytree(source, root)
        for step in range(8, ALONE_STEPS + 1, 4):
            shutil.rmtree(root / "checkpoints" / f"step-{step:06d}")
        change_topology(root, prepared, *more)
        same(go_on(root), kept, 8)


def change_topology(root: Path, prepared: RunFolder, *overrides: str) -> None:
    """Rewrite a run's profile for other degrees and eight steps."""
    from rollplex_cli.profile.dump import resolved_yaml
    from rollplex_cli.profile.load import load_profile

    given = small(*job(prepared, *overrides, "runtime.max_steps=8"))
    (root / "profile.yaml").write_text(resolved_yaml(load_profile("tiny", given)))


def test_four_ranks(prepared: RunFolder, alone: RunFolder, tmp_path: Path) -> None:
    """Two training groups of two ranks, each of one replica of two; and one group of four over two such replicas, whose
    decode and training launch in one order, through the real command line. The rollout's vision features are those of
    the rank itself, or brought from the replica that has them."""
    degrees = (FOUR, "topology.rollout_tp=2", "runtime.max_steps=3")
    reused = ("reuse.vision=true", "schedule.prefix_activations=recompute")
    expected = metrics(alone.root)
    same(train(tmp_path / "dp", *job(prepared, *degrees, *reused, "topology.train_tp=2")), expected, 3)
    ordered = ("topology.train_tp=4", "schedule.launch_order=always")
    done = command(tmp_path / "q", prepared, *degrees, *reused, *ordered)
    assert done.returncode == 0, done.stderr[-3000:]
    same(metrics(tmp_path / "q"), expected, 3)


def test_degrees_that_do_not_divide_are_named(prepared: RunFolder, tmp_path: Path) -> None:
    done = command(tmp_path / "a", prepared, FOUR, "topology.train_tp=3")
    assert done.returncode == 2
    assert "num_nodes 1 x ranks_per_node 4 = 4 ranks, 4 / train_tp 3 = 1.33 training groups" in done.stderr
    done = command(tmp_path / "b", prepared, "topology.ranks_per_node=8", "topology.train_tp=8")
    assert done.returncode == 2
    assert "4 attention heads, `topology.train_tp` is 8: 4 / 8 = 0.50 heads a rank" in done.stderr
