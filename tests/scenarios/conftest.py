"""One prepared job and one finished run for all scenarios, whichever test process asks first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock
from scenarios.support import ALONE, rollplex, sets, small

from rollplex_cli.core.paths import RunFolder

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from scenarios.support import prepare_run
prepare_run(Path(sys.argv[2]), None)
"""


def once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], None]) -> RunFolder:
    """The folder that `build` fills, once for all processes of the session. Nobody writes to it afterwards."""
    root = factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        root = root.parent
    folder, mark = root / name, root / f"{name}.done"
    with FileLock(root / f"{name}.lock"):
        if not mark.exists():
            build(folder)
            mark.touch()
    return RunFolder(folder)


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Clips and random weights. Made in a process of its own: torch stays out of this one."""

    def build(folder: Path) -> None:
        command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parents[1]), str(folder)]
        subprocess.run(command, check=True, timeout=240)

    return once(tmp_path_factory, "prepared", build)


@pytest.fixture(scope="session")
def alone(prepared: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of one rank that nothing disturbed (`support.ALONE`). Copy it before anything changes it."""

    def build(folder: Path) -> None:
        overrides = small("model.init=checkpoint", f"model.config={prepared.base_dir}", *ALONE)
        done = rollplex("train", "--profile", "tiny", "--run-dir", str(folder), "--plain", *sets(overrides))
        assert done.returncode == 0, done.stderr[-3000:]

    return once(tmp_path_factory, "alone", build)
