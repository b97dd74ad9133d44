"""Submission, with Slurm's programs played by scripts of a few lines: what reaches `sbatch`, what is left behind."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from rollplex_cli.cli import output
from rollplex_cli.cli.main import run
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.resources import shipped_folder
from rollplex_cli.launch.slurm.submit import grid
from rollplex_cli.profile.load import load_profile

SBATCH = """#!/bin/sh
cp "$1" '{folder}/script'
env > '{folder}/environment'
[ ! -f '{folder}/refuse' ] || {{ cat '{folder}/refuse' >&2; exit 1; }}
echo Submitted batch job 4711
"""


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("ROLLPLEX_PROFILE", raising=False)
    monkeypatch.setattr(output, "_json_mode", False)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cluster"
    folder.mkdir()
    for name, text in (
        ("sbatch", SBATCH.format(folder=folder)),
        ("srun", "#!/bin/sh\n"),
        ("sinfo", "#!/bin/sh\nexit 1\n"),
    ):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


def submit(*more: str) -> int:
    return run(["submit", "--slurm", "--profile", "tiny-2rank", "--no-data", *more])


def test_what_is_queued_is_what_the_dry_run_shows(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--run-dir", "r", "--time", "2:00:00", "--sbatch", "mail-type=END", "--dry-run") == 0
    shown = capsys.readouterr().out
    assert not Path("r").exists()
    assert submit("--run-dir", "r", "--time", "2:00:00", "--sbatch", "mail-type=END") == 0
    out, err = capsys.readouterr()
    assert (cluster / "script").read_text() == shown == Path("r/job.sh").read_text()
    assert "#SBATCH --time=2:00:00\n" in shown
    assert "#SBATCH --mail-type=END\n" in shown
    assert out == "4711\n"
    for word in (
        f"run folder: {Path('r').resolve()}",
        "logs/slurm.log",
        "rollplex logs -f 4711",
        "rollplex cancel 4711",
    ):
        assert word in err
    assert json.loads(Path("r/job.json").read_text())["job_id"] == "4711"


def test_a_copy_of_the_program_and_of_the_task_is_what_runs(cluster: Path) -> None:
    task = Path("my_task")
    shutil.copytree(shipped_folder("jobs") / "tasks" / "shapes", task)
    Path("rewards").mkdir()
    Path("rewards/mine.py").write_text("from other import x\ndef earn(sample, text, finished):\n    return 1.0\n")
    Path("rewards/other.py").write_text("x = 1\n")
    assert submit("--run-dir", "r", "--set", "task.name=my_task", "--set", "reward=rewards/mine.py:earn") == 0
    shutil.rmtree(task)
    shutil.rmtree("rewards")
    code = RunFolder(Path("r")).code_dir
    assert (code / "rollplex_cli" / "runtime" / "worker.py").is_file()
    assert (code / "rollplex_cli" / "shipped" / "profiles" / "tiny.yaml").is_file()
    assert load_profile("r/profile.yaml").task.name == str(code.resolve() / "tasks" / "my_task")
    [reward] = load_profile("r/profile.yaml").reward.parts
    file, _, function = reward.rpartition(":")
    assert function == "earn"
    assert Path(file).is_relative_to(code.resolve())
    assert Path(file).with_name("other.py").is_file()
    assert (code / "tasks" / "my_task" / "task.py").is_file()
    assert not list(code.rglob("__pycache__"))


def test_secrets_are_passed_and_never_written(
    cluster: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert submit("--run-dir", "r", "--env", "HF_TOKEN=s3cret") == 2
    assert "environment.HF_TOKEN: looks like a secret" in capsys.readouterr().err
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert submit("--run-dir", "r", "--env", "HF_TOKEN") == 2
    assert "not set in this shell" in capsys.readouterr().err
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    assert submit("--run-dir", "r", "--env", "HF_TOKEN", "--env", "NCCL_DEBUG=IN FO") == 0
    assert "HF_TOKEN=s3cret\n" in (cluster / "environment").read_text()
    written = [path.read_text(errors="replace") for path in Path("r").rglob("*") if path.is_file()]
    assert not [text for text in written if "s3cret" in text]
    assert "export NCCL_DEBUG='IN FO'\n" in (cluster / "script").read_text()


def test_variables_that_would_override_the_script_are_hidden(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_PARTITION", "wrong")
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    assert submit("--run-dir", "r") == 0
    passed = (cluster / "environment").read_text()
    assert "SBATCH_PARTITION" not in passed
    assert "SLURM_JOB_ID" not in passed
    assert "SLURM_CONF=/etc/other.conf\n" in passed
    assert os.environ["SBATCH_PARTITION"] == "wrong"


def test_slurm_s_own_words_come_through(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cluster / "refuse").write_text("sbatch: error: Batch job submission failed: Invalid account\n")
    assert submit("--run-dir", "r") == 4
    assert "Invalid account" in capsys.readouterr().err


def test_without_slurm(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert submit("--run-dir", "r") == 4
    assert "no Slurm here" in capsys.readouterr().err
    assert submit("--dry-run", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["script"].startswith("#!/bin/bash\n")
    assert shown["plans"][0]["topology"]["ranks_per_node"] == 2


def test_a_grid_is_an_array_of_runs(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--run-dir", "g", "--grid", "optimizer.lr=1e-3,1e-4", "--grid", "runtime.seed=0,1,2") == 0
    assert "#SBATCH --array=0-5%6\n" in (cluster / "script").read_text()
    profiles = [load_profile(f"g/{index}/profile.yaml") for index in range(6)]
    assert [(p.optimizer.lr, p.runtime.seed) for p in profiles] == [(lr, s) for lr in (1e-3, 1e-4) for s in range(3)]
    assert json.loads(Path("g/4/job.json").read_text())["job_id"] == "4711_4"
    capsys.readouterr()
    assert submit("--run-dir", "h", "--grid", "topology.num_nodes=1,2") == 2
    assert "must need the same nodes" in capsys.readouterr().err
    assert submit("--run-dir", "h", "--grid", "runtime.seed") == 2


def test_no_grid_is_one_run() -> None:
    assert grid([]) == [[]]


def test_a_run_that_ended_is_submitted_again(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--run-dir", "r") == 0
    assert submit("--run-dir", "r") == 2
    RunFolder(Path("r")).cancelled.write_text("{}")
    assert submit("--resume", "--run-dir", "r", "--set", "runtime.max_steps=7") == 0
    assert not RunFolder(Path("r")).cancelled.exists()
    assert load_profile("r/profile.yaml").runtime.max_steps == 7
    assert json.loads(Path("r/job.json").read_text())["earlier_jobs"] == ["4711"]


def test_a_job_that_cannot_run_is_not_queued(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert submit("--site", "one-node", "--set", "topology.device=cuda", "--set", "topology.ranks_per_node=9") == 2
    arguments = ["--profile", "qwen25vl7b", "--site", "one-node", "--run-dir", "r"]
    assert run(["submit", "--slurm", *arguments, "--set", "topology.ranks_per_node=16"]) == 3
    assert "GPUs per node: 16 needed" in capsys.readouterr().err
    assert not (cluster / "script").exists()
    assert not Path("r").exists()
