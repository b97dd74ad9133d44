"""A mixed data set in a file, decoded in worker processes, with a reward function of one's own, by the real CLI."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from scenarios.support import metrics, rollplex, sets, small, train

from rollplex_cli.core.paths import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

EXACT = ("step", "loss", "grad_norm", "reward_mean", "reward_std", "entropy", "logprob_diff_mean")
REWARD = """
import hashlib

async def noise(sample, text, finished):
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=2).digest(), "little") / 65535
"""
pytestmark = [pytest.mark.scenario, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def data(prepared: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten rows: videos as Video-R1 has them, images as verl has them, text as GSM8K has it."""
    folder = tmp_path_factory.mktemp("rows")
    rows: list[dict[str, Any]] = []
    for index, clip in enumerate(sorted((prepared.data_dir / "train").glob("*.mp4"))[:10]):
        picture = folder / f"{index}.png"
        pixels = np.random.default_rng(index).integers(0, 255, (56, 56 + 28 * (index % 3), 3), dtype=np.uint8)
        Image.fromarray(pixels).save(picture)
        video = {"problem": f"Where to ({index})?", "data_type": "video", "problem_type": "multiple choice",
                 "options": ["A. left", "B. right"], "solution": "<answer>A</answer>", "path": str(clip)}  # fmt: skip
        image = {"prompt": [{"role": "user", "content": "Is <image> grey?"}], "images": [{"path": picture.name}],
                 "reward_model": {"ground_truth": "no"}}  # fmt: skip
        text = {"question": f"{index} + 1 = <image>?", "answer": f"so\n#### {index + 1}"}
        rows.append((video, image, text)[index % 3])
    # Held out, and nobody can look at it: evaluations go on without it.
    rows.append({"question": "?", "answer": "x", "image": "gone.png"})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "mine.py").write_text(REWARD, encoding="utf-8")
    return folder


def job(prepared: RunFolder, data: Path, *more: str) -> list[str]:
    own = [s for s in small() if not s.startswith(("task.", "model.init", "evaluation."))]
    return [
        *own, "task.name=rows", f"task.options={{path: {data}/train.jsonl, num_heldout: 3}}", "model.init=checkpoint",
        f"model.config={prepared.base_dir}", f"reward.parts={{{data}/mine.py:noise: 1.0, format: 0.1}}",
        "evaluation.num_samples=3", "data.on_bad_media=skip", "evaluation.every_steps=1", "evaluation.temperature=1.0",
        "evaluation.num_responses=3", "evaluation.best_metric=reward", "logging.tensorboard=true",
        "runtime.checkpoint_every=1", "runtime.max_steps=4", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def finished(prepared: RunFolder, data: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    run = RunFolder(tmp_path_factory.mktemp("mixed") / "run")
    given = sets(job(prepared, data, "data.worker_kind=process", "data.num_workers=2"))
    done = rollplex("train", "--profile", "tiny", "--run-dir", str(run.root), "--plain", *given)
    assert done.returncode == 0, done.stderr[-3000:]
    return run


def test_workers_and_restarts_change_no_bit(
    finished: RunFolder, prepared: RunFolder, data: Path, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    train(run.root, *job(prepared, data, "data.num_workers=0", "runtime.max_steps=2"))
    done = rollplex("train", "--resume", "--run-dir", str(run.root), "--plain", "--max-steps", "4")
    assert done.returncode == 0, done.stderr[-3000:]
    one, other = ([{key: row[key] for key in EXACT} for row in metrics(r.root)] for r in (run, finished))
    assert one == other
    assert run.evaluations.read_text() == finished.evaluations.read_text()


def test_what_the_run_leaves(finished: RunFolder) -> None:
    rows = metrics(finished.root)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(set(row["reward_parts"]) == {"noise", "format"} for row in rows)
    assert all(0 <= row["data_wait_share"] < 1 and row["reward_errors"] == 0 for row in rows)
    assert all(row["skipped_samples"] == 1 for row in rows)
    evaluations = [json.loads(line) for line in finished.evaluations.read_text().splitlines()]
    assert [e["step"] for e in evaluations] == [0, 1, 2, 3, 4]
    assert all(e["num_samples"] == 2 for e in evaluations)
    responses = [json.loads(line) for line in (finished.rollouts_dir / "rank0.jsonl").read_text().splitlines()]
    assert len(responses) == 4 * 4 * 4
    assert {len(row["media"]) for row in responses} == {0, 1}
    assert all(row["logprob_mean"] < 0 and row["prompt"][-1][0] == "user" for row in responses)
    assert list((finished.root / "tensorboard").glob("events.*"))
    assert not list((finished.root / "data").rglob("*.part"))


def test_the_best_checkpoint_is_kept(finished: RunFolder) -> None:
    evaluations = [json.loads(line) for line in finished.evaluations.read_text().splitlines()]
    best, expected = evaluations[0]["heldout_reward"], None
    for row in evaluations[1:]:
        if row["heldout_reward"] > best:
            best, expected = row["heldout_reward"], f"step-{row['step']:06d}"
    named = finished.checkpoints_dir / "best"
    assert (named.read_text().strip() if named.exists() else None) == expected
    kept = {path.name for path in finished.checkpoints_dir.glob("step-*")}
    assert {"step-000003", "step-000004"} <= kept
    assert expected is None or expected in kept


def test_the_report_shows_samples(finished: RunFolder) -> None:
    done = rollplex("report", str(finished.root))
    assert done.returncode == 0, done.stderr[-2000:]
    html = (finished.report_dir / "report.html").read_text(encoding="utf-8")
    assert html.count("data:image/jpeg;base64,") >= 8
    assert "true answer" in html


def test_the_best_can_be_exported(finished: RunFolder, tmp_path: Path) -> None:
    (finished.checkpoints_dir / "best").write_text("step-000003\n")
    done = rollplex("export", str(finished.root), "--to", str(tmp_path / "out"), "--best")
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "out" / "config.json").is_file()
    assert "step 3 exported" in (finished.logs_dir / "export.log").read_text()
