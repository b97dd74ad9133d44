"""LoRA through the real command line: it learns, resumes to the bit, is exported, and knows no schedule or layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from safetensors.torch import load_file
from scenarios.support import go_on, metrics, prepare_run, rollplex, run_script, sets, small, train

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.launch.run_folder import START_MARK

if TYPE_CHECKING:
    import torch

pytestmark = [pytest.mark.scenario, pytest.mark.timeout(600)]

STEPS, STOP = 16, 8
RANK, ALPHA = 8, 16.0
EXACT = ("step", "loss", "kl", "grad_norm", "reward_mean", "reward_std", "entropy", "logprob_diff_mean")
# Random weights earn about a third; steering towards some of the letters earns more.
REWARD = """
def early_letters(sample, text, finished):
    return sum(c in "abcdefghi" for c in text.lower()) / max(1, len(text))
"""


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "mine.py"
    path.write_text(REWARD, encoding="utf-8")
    return path


def job(prepared: RunFolder, reward: Path, *more: str) -> list[str]:
    return [
        "model.init=checkpoint", f"model.config={prepared.base_dir}", f"lora.rank={RANK}", f"lora.alpha={ALPHA}",
        f"reward.parts={{{reward}:early_letters: 1.0}}", "optimizer.lr=1e-2", "algorithm.kl_coef=0.001",
        "rollout.group_size=8", "guards.check_publish=true", f"runtime.max_steps={STEPS}",
        f"runtime.checkpoint_every={STOP}", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def finished(prepared: RunFolder, reward: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora") / "run"
    given = sets(small(*job(prepared, reward)))
    done = rollplex("train", "--profile", "tiny", "--run-dir", str(root), "--plain", *given)
    assert done.returncode == 0, done.stderr[-3000:]
    return root


def test_it_learns_on_policy_against_its_base(finished: Path) -> None:
    found = metrics(finished)
    rewards = [row["reward_mean"] for row in found]
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.1, rewards
    assert all(row["logprob_diff_max"] < 1e-5 for row in found)
    # The adapters begin at zero: policy and base are one, and part after the first update.
    assert found[0]["kl"] == 0.0 and all(row["kl"] > 0 for row in found[1:])
    plan = json.loads((finished / "plan.json").read_text())
    objects = {item["name"] for phase in plan["memory"]["phases"] for item in phase["objects"]}
    assert "reference_boundary" in objects and "reference_weights" not in objects


def test_a_resumed_run_ends_with_the_same_bits(finished: Path, tmp_path: Path) -> None:
    root = tmp_path / "run"
    shutil.copytree(finished, root, symlinks=True)
    shutil.rmtree(root / "checkpoints" / f"step-{STEPS:06d}")
    assert len(go_on(root)) == STEPS
    log = RunFolder(root).rank_log(0).read_text().rpartition(START_MARK)[2]
    assert f"step {STOP + 1}: " in log and f"step {STOP}: " not in log
    one, other = ([{key: row[key] for key in EXACT} for row in metrics(r)] for r in (root, finished))
    assert one == other


def test_two_ranks_train_like_one(finished: Path, prepared: RunFolder, reward: Path, tmp_path: Path) -> None:
    """Both engines sharded, and only the trainer."""
    expected = metrics(finished)[:2]
    for rollout_tp in (2, 1):
        degrees = ("topology.ranks_per_node=2", "topology.train_tp=2", f"topology.rollout_tp={rollout_tp}")
        found = train(tmp_path / str(rollout_tp), *job(prepared, reward, *degrees, "runtime.max_steps=2"))
        for row, other in zip(found, expected, strict=True):
            assert row["reward_mean"] == pytest.approx(other["reward_mean"], abs=1e-9)
            assert row["loss"] == pytest.approx(other["loss"], abs=1e-4)
            assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
            assert row["logprob_diff_max"] < 1e-5


def test_schedules_give_the_same_bits(prepared: RunFolder, reward: Path, tmp_path: Path) -> None:
    run = prepare_run(
        tmp_path / "run", prepared, f"lora.rank={RANK}", "lora.targets=[q_proj, v_proj, down_proj]",
        "optimizer.lr=1e-2", "algorithm.kl_coef=0.01",
    )  # fmt: skip
    script = Path(__file__).parents[1] / "schedule_equality.py"
    results = run_script(script, run.root, 4, timeout_s=580)[0]["results"]
    expected = results["colocate"]
    assert expected["4"]["distinct_losses"] == 4 and expected["4"]["diff_max"] < 1e-5
    packed = results["packed colocate"]
    assert packed["4"]["largest_pack"] > 1  # and shares the frozen tower's pass
    for name, result in results.items():
        assert result == (packed if name.startswith("packed") else expected), name


def test_exports_are_an_adapter_or_a_model(finished: Path, prepared: RunFolder, tmp_path: Path) -> None:
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    done = rollplex("export", str(finished), "--to", str(adapter), "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["adapter"] == str(adapter)
    assert sorted(path.name for path in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((adapter / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(prepared.base_dir.resolve())
    done = rollplex("export", str(finished), "--to", str(merged), "--merge")
    assert done.returncode == 0, done.stderr[-2000:]
    factors = load_file(adapter / "adapter_model.safetensors")
    base, model = weights_of(prepared.base_dir), weights_of(merged)
    assert base.keys() == model.keys() and (merged / "tokenizer.json").is_file()
    adapted = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in factors}
    for module in adapted:
        a, b = (factors[f"base_model.model.{module}.lora_{x}.weight"] for x in "AB")
        name = module.replace("model.language_model.", "model.") + ".weight"
        assert not model[name].equal(base[name])
        assert model[name].allclose(base.pop(name) + ALPHA / RANK * b @ a, atol=1e-6), name
    assert all(model[name].equal(value) for name, value in base.items())  # nothing else was touched


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_there_is_nothing_to_merge_without_adapters(prepared: RunFolder, tmp_path: Path) -> None:
    done = rollplex("export", str(prepared.root), "--to", str(tmp_path / "out"), "--merge")
    assert done.returncode == 2
    assert "trained no adapters" in done.stderr and "Traceback" not in done.stderr
