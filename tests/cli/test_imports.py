from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest

HEAVY = {"torch", "torchvision", "cuda", "sglang", "deepspeed", "transformers", "numpy", "matplotlib", "av"}
LATER = {"pydantic", "yaml", "rapidfuzz", "filelock"}
PROGRAM = """
import json, sys
from rollplex_cli.cli.main import run
code = run({arguments!r})
print()
print(json.dumps([code, sorted({{name.partition('.')[0] for name in sys.modules}})]))
"""


def modules_after(*arguments: str) -> tuple[int, set[str]]:
    """Exit code and top-level modules of a fresh interpreter that ran the program."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(arguments=list(arguments))], capture_output=True, text=True, check=True
    )
    code, names = json.loads(done.stdout.splitlines()[-1])
    return code, set(names)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_loads_no_engine(arguments: list[str]) -> None:
    code, names = modules_after(*arguments)
    assert code == 0
    assert not names & HEAVY


def test_help_loads_nothing_that_profiles_need() -> None:
    assert not modules_after("--help")[1] & LATER


@pytest.mark.parametrize("arguments", [["profiles", "ls"], ["profile-memory", "--profile", "qwen25vl32b"]])
def test_planning_loads_no_engine(arguments: list[str]) -> None:
    code, names = modules_after(*arguments)
    assert code == 0
    assert not names & HEAVY


@pytest.mark.scenario
def test_help_answers_at_once() -> None:
    def seconds() -> float:
        started = time.monotonic()
        subprocess.run([sys.executable, "-m", "rollplex_cli.cli.main"], check=True, env=os.environ)
        return time.monotonic() - started

    subprocess.run([sys.executable, "-c", "import rollplex_cli.cli.main"], check=True)
    assert min(seconds() for _ in range(5)) < 1.0
