"""Programs in forks of a warm process are what an interpreter would make of them."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import pytest
import warm

from rollplex_cli.launch.subprocess import living

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.scenario


def test_arguments_output_and_environment(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nprint(__name__, sys.argv, beside.VALUE, file=sys.stderr)")
    (tmp_path / "beside.py").write_text("VALUE = 7")
    code = "import os, sys; print(sys.argv, os.environ['ASKED'], os.getcwd(), flush=True); os.system('echo of a child')"
    one, other = warm.run([["-c", code, 1], [script, "x"]], env={"ASKED": "yes"})
    assert one.stdout == f"['-c', '1'] yes {os.getcwd()}\nof a child\n"
    assert (one.returncode, one.stderr, other.stdout) == (0, "", "")
    assert other.stderr == f"__main__ {[str(script), 'x']} 7\n"


def test_every_end_has_its_exit_code() -> None:
    ends = ["pass", "raise SystemExit(3)", "raise SystemExit('no')", "1 / 0", "import os; os.kill(os.getpid(), 9)"]
    done = warm.run([["-c", end] for end in ends])
    assert [each.returncode for each in done] == [0, 3, 1, 1, -signal.SIGKILL]
    assert done[2].stderr == "no\n" and "ZeroDivisionError" in done[3].stderr


def test_what_takes_too_long_is_killed_with_its_children() -> None:
    code = "import os, time; print(os.getpid(), os.fork() or os.getpid(), flush=True); time.sleep(600)"
    hung, good = warm.run([["-c", code], ["-c", "pass"]], timeout_s=2)
    assert (hung.returncode, good.returncode) == (-signal.SIGKILL, 0)
    pids = {int(pid) for pid in hung.stdout.split()}
    end = time.monotonic() + 10
    while pids & living():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_ranks_meet_at_one_store() -> None:
    code = """
import os
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = torch.tensor([dist.get_rank() + 1])
dist.all_reduce(rank)
print(rank.item(), os.environ["LOCAL_RANK"])
"""
    done = warm.run_ranks(["-c", code], 3)
    assert [each.stdout for each in done] == ["6 0\n", "6 1\n", "6 2\n"], done
