"""`rollplex check`: what is wrong is said before anything is held."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollplex_cli.cli import output
from rollplex_cli.cli.main import run
from rollplex_cli.core.errors import DataError
from rollplex_cli.launch.check.cluster import check_partition, default_partition, parse_sinfo, partition_faults
from rollplex_cli.launch.check.data import longest_prompt
from rollplex_cli.launch.check.job import missing_files
from rollplex_cli.profile.load import load_profile, load_site

SINFO = "gpu|up|1-00:00:00|6|96|1000000|gpu:h100:8(S:0-1)|hbm3,ib\ngpu|up|1-00:00:00|2|64|500000|(null)|(null)\n"
NOISE = Path(__file__).parents[2] / "scenarios" / "noise_task"


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_json_mode", False)
    monkeypatch.delenv("ROLLPLEX_SITE", raising=False)


def check(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, object]]]:
    code = run(["check", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    return code, {finding["name"]: finding for finding in found["findings"]}


def test_a_good_job(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, found = check(capsys, "--no-data", "--profile", "qwen25vl32b", "--site", "four-nodes")
    assert found.pop("model")["level"] == "error"  # no weights on this machine
    assert code == 2
    levels = {name: finding["level"] for name, finding in found.items()}
    assert levels == {
        "topology": "ok", "memory": "ok", "slurm": "skipped", "stop signal": "skipped", "data": "skipped",
    }  # fmt: skip


def test_a_job_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = check(capsys, "--no-data", "--profile", "qwen25vl32b", "--site", "one-node")
    assert code == 2  # its first error is that one node is not four; see the details
    code, found = check(
        capsys, "--no-data", "--profile", "qwen25vl7b", "--site", "one-node", "--set", "memory.budget_gib=20"
    )
    assert code == 3
    assert "memory per GPU" in str(found["memory"]["details"])


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, found = check(capsys, "--no-data", "--set", f"runtime.master_port={port}")
    assert code == 4
    assert str(port) in str(found["ports"]["text"])


def test_partition_limits() -> None:
    profile = load_profile("qwen25vl32b")
    kinds = parse_sinfo(SINFO)
    assert (kinds[0].gpus, kinds[0].num_nodes, kinds[0].time_limit_s) == (8, 6, 86400)
    site = load_site("four-nodes", ["slurm.time=24:00:00"])
    assert partition_faults(profile, site, kinds) == []
    assert partition_faults(profile, load_site("four-nodes"), kinds) == [
        "`slurm.time` is 48 h 00 min, its limit is 24 h 00 min"
    ]
    rare = load_site("four-nodes", ["slurm.time=1:00:00", "slurm.constraint=hbm4"])
    assert partition_faults(profile, rare, kinds) == [
        "4 nodes needed with 96 CPUs, 8 GPUs, the feature `hbm4` each, it has: 0"
    ]
    assert default_partition("cpu\ngpu*\n") == "gpu"


def test_an_unknown_partition_is_named_with_those_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sinfo").write_text("#!/bin/sh\necho 'low*'\necho high\n")
    (tmp_path / "sinfo").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    finding = check_partition(load_profile("tiny"), load_site("local", ["slurm.partition=hihg"]))
    assert (finding.level, finding.exit_code) == ("error", 4)
    assert "`hihg`" in finding.text
    assert finding.details == ("partitions here: high, low",)


def test_a_checkpoint_s_missing_files_are_listed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert len(missing_files(tmp_path)) == 3
    (tmp_path / "tokenizer.json").touch()
    (tmp_path / "preprocessor_config.json").touch()
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "model-1.safetensors").touch()
    assert missing_files(tmp_path) == ["1 of 2 files of weights, the first is model-2.safetensors"]
    (tmp_path / "model-2.safetensors").touch()
    assert missing_files(tmp_path) == []


DATA = ["--set", f"task.name={NOISE}", *(
    part for key in ("num_train_clips=12", "num_validation_clips=1", "num_eval_clips=2")
    for part in ("--set", f"task.options.{key}")
)]  # fmt: skip


BAD_TASK = """
import dataclasses, time
from pathlib import Path
from rollplex_cli.data.tasks import load_task
shapes = load_task("shapes")
prepare, build_base, answer_text = shapes.prepare, shapes.build_base, shapes.answer_text
def samples(data_dir, split):
    rows = shapes.samples(data_dir, split)
    if split != "train":
        return rows
    (data_dir / "train" / "00001.mp4").write_bytes(b"no video")
    rows[2] = dataclasses.replace(rows[2], question="what is <|video_pad|>?")
    rows[3] = dataclasses.replace(rows[3], question="long " * 200)
    return rows
def reward(sample, text, finished):
    time.sleep(60)
"""


@pytest.mark.scenario
def test_bad_rows_and_a_stuck_reward_are_all_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "task.py").write_text(BAD_TASK)
    monkeypatch.setattr("rollplex_cli.launch.check.data.check_data.__kwdefaults__", {"reward_limit_s": 12.0})
    code, found = check(capsys, *DATA, "--set", f"task.name={tmp_path}", "--set", "data.max_prompt_tokens=300")
    assert code == 2
    bad = str(found["data"]["details"])
    assert "train-00001: video cannot be decoded" in bad
    assert "train-00002: question holds the special token: <|video_pad|>" in bad
    assert found["prompts"]["level"] == "error"
    assert "1 of 12 prompts are longer than `data.max_prompt_tokens` allows: 300" in str(found["prompts"]["text"])
    assert str(found["prompts"]["details"]).count("train-00003") == 1
    assert found["reward"]["text"] == "the reward function did not return within 12 s"


@pytest.mark.scenario
def test_two_hundred_samples_in_half_a_minute() -> None:
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "rollplex_cli.cli.main", "check", "--profile", "tiny"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "512 train, 96 heldout rows; 200 of them opened" in done.stdout
    assert "train-00000: 92 tokens, 64 of them media" in done.stdout
    assert 'the true answer of `train-00000` earns {"exact": 0.9, "format": 0.1}' in done.stdout
    # On an idle machine of two cores; other tests may run beside it.
    assert time.monotonic() - started < 60


@pytest.mark.scenario
def test_the_longest_prompt_of_the_data() -> None:
    found = longest_prompt(load_profile("tiny"), 24)
    assert found == {"sample_id": "train-00000", "tokens": 92, "media_tokens": 64, "num_checked": 24}


@pytest.mark.scenario
def test_the_longest_prompt_of_no_data(tmp_path: Path) -> None:
    missing = tmp_path / "rows.jsonl"
    with pytest.raises(DataError, match=f"cannot read the data of task `rows`: no such data set: {missing}"):
        longest_prompt(load_profile("qwen25vl3b", [f"task.options.path={missing}"]), 24)
