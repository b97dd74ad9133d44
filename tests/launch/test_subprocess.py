from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from rollplex_cli.launch.subprocess import Child, children, descendants, find_processes, run_text

SLEEPER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "


def wait_for(condition: object, limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def test_output_of_both_streams_goes_to_the_log(tmp_path: Path) -> None:
    program = "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"
    child = Child([sys.executable, "-c", program], log=tmp_path / "logs" / "c.log", env=os.environ)
    assert child.wait(20) == 3
    assert sorted((tmp_path / "logs" / "c.log").read_text().split()) == ["err", "out"]


def test_killing_takes_the_grandchildren_along(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", SLEEPER + "time.sleep(60)"], log=tmp_path / "c.log", env=os.environ)
    wait_for(lambda: descendants(child.pid))
    [grandchild] = descendants(child.pid)
    assert children(child.pid) == [grandchild]
    child.kill_tree()
    assert child.poll() == -signal.SIGKILL
    wait_for(lambda: grandchild not in descendants(1))
    child.kill_tree()


def test_child_has_its_own_session_so_that_ctrl_c_passes_it_by(tmp_path: Path) -> None:
    child = Child([sys.executable, "-c", "import time; time.sleep(60)"], log=tmp_path / "c.log", env=os.environ)
    assert os.getsid(child.pid) != os.getsid(0)
    child.send(signal.SIGTERM)
    assert child.wait(10) == -signal.SIGTERM


def test_processes_are_found_by_whole_arguments(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "import time; time.sleep(60)", "worker", str(tmp_path)]
    child = Child(argv, log=tmp_path / "c.log", env=os.environ)
    wait_for(lambda: find_processes("worker", str(tmp_path)))
    assert find_processes("worker", str(tmp_path)) == [child.pid]
    assert find_processes("work", str(tmp_path)) == []
    child.kill_tree()


def test_commands_that_fail_or_are_missing_give_none() -> None:
    assert run_text([sys.executable, "-c", "print(1)"]) == "1\n"
    assert run_text([sys.executable, "-c", "raise SystemExit(1)"]) is None
    assert run_text(["no-such-program-here"]) is None
    assert run_text([sys.executable, "-c", "import time; time.sleep(9)"], timeout_s=0.2) is None
