"""Sites: what belongs to a cluster, checked like a profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollplex_cli.core.errors import ProfileError
from rollplex_cli.core.resources import shipped_sites
from rollplex_cli.core.units import parse_time_limit
from rollplex_cli.profile.fields import key_paths
from rollplex_cli.profile.load import load_site
from rollplex_cli.profile.site import Site

KEYS = {
    "description", "environment", "inherit_environment", "name", "node.cpus", "node.gpu_gib", "node.gpus",
    "node.host_gib", "pass_environment", "python", "runs_dir", "setup", "slurm.account", "slurm.array_parallelism",
    "slurm.constraint", "slurm.dependency", "slurm.exclude", "slurm.exclusive", "slurm.gres", "slurm.max_requeues",
    "slurm.mem", "slurm.partition", "slurm.qos", "slurm.reservation", "slurm.sbatch", "slurm.stop_lead_s", "slurm.time",
    "srun", "wrapper",
}  # fmt: skip


def test_keys() -> None:
    assert set(key_paths(Site)) == KEYS


def test_every_shipped_site_loads() -> None:
    sites = shipped_sites()
    assert set(sites) >= {"local", "one-node", "four-nodes"}
    assert [load_site(name).name for name in sites] == list(sites)


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("slrum: {}", "site.yaml:2: slrum: unknown key, did you mean `slurm`?"),
        ("slurm: {partitoin: x}", "site.yaml:2: slurm.partitoin: unknown key, did you mean `partition`?"),
        ("setup: module load", "site.yaml:2: setup: got the text `module load`, expected a list of values, each text"),
        ("setup: [1]", "site.yaml:2: setup.0: got 1, expected text"),
        ("environment: {A: 1}", "site.yaml:2: environment.A: got 1, expected text"),
        ("environment: {WANDB_API_KEY: x}", "looks like a secret: list its name in `pass_environment` instead"),
        ("environment: {MONKEY: x}", None),
        ("environment: {'a b': x}", "expected the name of an environment variable"),
        ("slurm: {time: soon}", "slurm.time: got the text `soon`, expected a time limit such as `2-00:00:00`"),
        ("slurm: {time: '5', stop_lead_s: 300}", "expected less than the 300 s of `slurm.time`: 5"),
        ("slurm: {sbatch: {signal: x}}", "slurm.sbatch.signal: `--signal` is set by the launch itself"),
        ("slurm: {sbatch: {ntasks_per_node: 2}}", "`--ntasks-per-node` is set by the launch itself"),
        ('slurm: {sbatch: {comment: "a\\nb"}}', "got text with a line break, expected one line"),
        ('slurm: {partition: "a\\nb"}', "got text with a line break, expected one line"),
    ],
)
def test_faults(line: str, fault: str | None, tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(f"name: x\n{line}\n")
    if fault is None:
        load_site(path)
        return
    with pytest.raises(ProfileError) as caught:
        load_site(path)
    assert fault in caught.value.message


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30", 1800), ("1:30", 90), ("2:00:00", 7200), ("1-12", 129600), ("1-00:30", 88200), ("2-00:00:01", 172801),
     ("UNLIMITED", None), ("infinite", None), ("", None), ("1:2:3:4", None)],
)  # fmt: skip
def test_time_limits(text: str, seconds: int | None) -> None:
    assert parse_time_limit(text) == seconds
