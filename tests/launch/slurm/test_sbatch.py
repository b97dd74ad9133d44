"""Job scripts, whole: what is queued is exactly this text."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex_cli.launch.slurm.sbatch import job_name, job_script, sbatch_text
from rollplex_cli.profile.load import load_profile, load_site

Golden = Callable[[str, str], None]
HOSTILE = [
    "with space",
    "quote\"s and 'these'",
    "line\nbreak",
    "100%j",
    "$HOME `date` $(date)",
    "\\back",
    "a;b&c",
]


def text(
    profile: str,
    site: str,
    *,
    run_dir: Path = Path("/shared/runs/r1"),
    sets: tuple[str, ...] = (),
    array: int | None = None,
) -> str:
    job = job_script(
        load_profile(profile),
        load_site(site, sets),
        run_dir=run_dir,
        work_dir=Path("/home/user/work"),
        python="/opt/venv/bin/python",
        code_dir=run_dir / "code",
        array_size=array,
    )
    return sbatch_text(job)


def test_golden_local(golden: Golden) -> None:
    golden("sbatch_local.sh", text("tiny-2rank", "local"))


def test_golden_one_node(golden: Golden) -> None:
    golden("sbatch_one_node.sh", text("qwen25vl7b", "one-node"))


def test_golden_four_nodes(golden: Golden) -> None:
    golden("sbatch_four_nodes.sh", text("qwen25vl32b", "four-nodes"))


def test_golden_array(golden: Golden) -> None:
    golden("sbatch_array.sh", text("qwen25vl7b", "one-node", sets=("slurm.array_parallelism=2",), array=6))


def test_golden_everything_passed_through(golden: Golden) -> None:
    sets = (
        "slurm.account=a", "slurm.partition=p", "slurm.qos=q", "slurm.constraint='h100&ib'", "slurm.exclude=n[1-3]",
        "slurm.reservation=r", "slurm.gres=gpu:h100:8", "slurm.dependency=afterok:17", "slurm.time=1-12",
        "slurm.sbatch.mail-type=END", "slurm.sbatch.comment=two words", "slurm.sbatch.nice=100",
        "slurm.sbatch.contiguous=true", "slurm.sbatch.overcommit=false",
        "setup=['source conda.sh', 'conda activate x']",
        "environment.NCCL_DEBUG=INFO", "environment.MESSAGE=\"it's $5\"", "pass_environment=[HF_TOKEN]",
        "inherit_environment=false", "srun=['--container-image=image:1', '--cpu-bind=none']",
        "wrapper=[apptainer, exec, my image.sif]", "python=/usr/bin/python3",
    )  # fmt: skip
    golden("sbatch_everything.sh", text("qwen25vl7b", "one-node", sets=sets))


@pytest.mark.parametrize("array", [None, 3])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_paths_reach_the_shell_as_they_are(name: str, array: int | None, tmp_path: Path) -> None:
    run_dir = tmp_path / name / "run"
    script = text("tiny", "local", run_dir=run_dir, array=array)
    folder = run_dir / "1" if array else run_dir
    (folder / "logs").mkdir(parents=True)
    assert not [line for line in script.splitlines() if line.startswith("#SBATCH") and name in line]
    # Everything the shell would run is left out but what it makes of the path and the environment.
    kept, _, _ = script.partition("# Command")
    kept = kept.replace(shlex.quote("/home/user/work"), shlex.quote(str(tmp_path)))
    program = kept + '\nprintf %s "$run_dir"\nprintf %s "$PYTHONPATH" >&2\n'
    done = subprocess.run(
        ["bash", "-c", program],
        capture_output=True,
        env={"SLURM_ARRAY_TASK_ID": "1", "PATH": "/usr/bin:/bin"},
        check=True,
    )
    log = folder / "logs" / "slurm.log"
    said = log.read_bytes() if log.exists() else done.stdout + done.stderr
    assert said == str(folder).encode() + str(run_dir / "code").encode()


def test_plain_paths_are_left_to_slurm() -> None:
    assert "#SBATCH --output=/shared/runs/r1/logs/slurm.log" in text("tiny", "local")
    assert "#SBATCH --output=/shared/runs/r1/%a/logs/slurm.log" in text("tiny", "local", array=2)


@pytest.mark.parametrize(
    ("name", "printed"), [("tiny", "tiny"), ("a b/c", "a-b-c"), ("\n", "rollplex"), ("x%j", "x-j")]
)
def test_job_names(name: str, printed: str) -> None:
    assert job_name(name) == printed


def test_scripts_are_shell() -> None:
    for profile, site in (("tiny", "local"), ("qwen25vl7b", "one-node"), ("qwen25vl32b", "four-nodes")):
        subprocess.run(["bash", "-n"], input=text(profile, site), text=True, check=True)
