"""Profiles broken in every way a key can be: exit code 2, no traceback, and the key is named."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import pytest

from rollplex_cli.cli import output
from rollplex_cli.cli.main import run
from rollplex_cli.profile import fields
from rollplex_cli.profile.schema import Profile

CONTRADICTIONS = {
    "rollout.group_size": ["rollout.group_size=1"],
    "topology.rollout_tp": ["topology.ranks_per_node=4", "topology.train_tp=2", "topology.rollout_tp=4"],
    "topology.train_tp": ["topology.ranks_per_node=3", "topology.train_tp=2"],
    "algorithm.prompts_per_step": ["topology.ranks_per_node=3"],
    "rollout.kv_tokens": ["rollout.kv_tokens=100"],
    "data.min_pixels": ["data.min_pixels=99999"],
    "rollout.top_k": ["rollout.top_k=0"],
    "cold_start.test_from_step": ["cold_start.test_from_step=999"],
    "model.config": ["model.config=qwen25vl9b"],
}


def leaves(kind: type = Profile, prefix: str = "") -> dict[str, Any]:
    """Every key with its annotation."""
    found: dict[str, Any] = {}
    for name, annotation in fields.fields_of(kind).items():
        section = fields.section_of(annotation)
        found |= leaves(section, f"{prefix}{name}.") if section else {prefix + name: annotation}
    return found


def broken() -> dict[str, tuple[str, list[str]]]:
    """Case to the key it must name and the overrides that break it."""
    cases = {f"contradiction: {key}": (key, sets) for key, sets in CONTRADICTIONS.items()}
    for key, annotation in leaves().items():
        cases[f"type: {key}"] = (key, [f"{key}={'text' if 'text' not in fields.expected(annotation) else '[1]'}"])
        for value in beyond(annotation):
            cases[f"range: {key}={value}"] = (key, [f"{key}={value}"])
        section, _, name = key.rpartition(".")
        misspelt = f"{section}.{name[:-1]}{'x' if name[-1] != 'x' else 'z'}".lstrip(".")
        cases[f"spelling: {misspelt}"] = (misspelt, [f"{misspelt}=1"])
    return cases


def beyond(annotation: Any) -> list[str]:
    """Values just outside the limits of a number, or outside a choice."""
    if get_origin(annotation) is Literal:
        return ["nonsense"]
    if get_origin(annotation) is not Annotated:
        return []
    values = []
    for item in (m for extra in get_args(annotation)[1:] for m in getattr(extra, "metadata", [extra])):
        for name, step in (("ge", -1), ("gt", 0), ("le", 1), ("lt", 0)):
            if hasattr(item, name):
                values.append(str(getattr(item, name) + step))
    return values


CASES = broken()


def test_there_are_enough() -> None:
    kinds = [case.partition(":")[0] for case in CASES]
    assert len(CASES) >= 50
    assert {kind: kinds.count(kind) > 5 for kind in kinds} == dict.fromkeys(
        ("contradiction", "type", "range", "spelling"), True
    )


@pytest.mark.parametrize("case", CASES)
def test_a_broken_profile_is_refused(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(output, "_json_mode", False)
    key, overrides = CASES[case]
    sets = [part for override in overrides for part in ("--set", override)]
    for command in (["check"], ["submit", "--slurm", "--dry-run"]):
        assert run([*command, "--profile", "tiny", *sets]) == 2
        out, err = capsys.readouterr()
        assert key in err
        assert err.startswith("error: ")
        assert "Traceback" not in out + err
        assert "unexpected" not in err


@pytest.mark.scenario
def test_help_and_dry_run_answer_at_once() -> None:
    def seconds(*arguments: str) -> float:
        """CPU time: what the clock says depends on what else the machine does."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "rollplex_cli.cli.main", *arguments], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds("--help") for _ in range(7)) < 0.3
    dry_run = ("submit", "--slurm", "--site", "one-node", "--profile", "qwen25vl7b", "--dry-run")
    assert min(seconds(*dry_run) for _ in range(4)) < 1.5
