"""One prepared job for all scenarios of a session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rollplex_cli.core.paths import RunFolder

SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from scenarios.support import prepare_run
prepare_run(Path(sys.argv[2]), None)
"""


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Clips and random weights, made once. In a process of its own: torch stays out of this one."""
    root = tmp_path_factory.mktemp("prepared")
    subprocess.run([sys.executable, "-c", SCRIPT, str(Path(__file__).parents[1]), str(root)], check=True, timeout=240)
    return RunFolder(root)
