"""A pointer used after unmap: the process dies, and its last words name the region."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

from rollplex_cli.memory import crash

PRELUDE = """
import ctypes, faulthandler, os, sys, threading
import torch
from rollplex_cli.core.units import MIB
from rollplex_cli.memory import crash
from rollplex_cli.memory.manager import MemoryManager
from rollplex_cli.memory.vmm import open_driver

manager = MemoryManager(open_driver("cpu", capacity_bytes=64 * MIB), budget_bytes=64 * MIB, host_budget_bytes=0)
region = manager.region("rollout_kv", 16 * MIB)
region.place("k_buffer", (2 * MIB,), torch.float32)
manager.map("rollout_kv")
kept = region.tensor("k_buffer")
kept.fill_(1)
def unmap():
    manager.unmap("rollout_kv", after="decode[3]")
"""

USES = {
    "python holds the lock": "unmap(); ctypes.string_at(kept.data_ptr() + 64, 8)",
    "kernel with threads": "torch.set_num_threads(2); unmap(); kept.add_(1)",
    "another thread": "unmap(); t = threading.Thread(target=lambda: kept.sum()); t.start(); t.join()",
    "faulthandler enabled before": "",
    # One thread: a second one that faults beside it ends the process in the middle of faulthandler's traceback.
    "faulthandler enabled after": "torch.set_num_threads(1); faulthandler.enable(); unmap(); kept.sum()",
    "region closed": "unmap(); manager.close_region('rollout_kv'); kept.sum()",
}


def run(body: str, *, before: str = "") -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(PRELUDE) + before + "\ncrash.install()\ncrash.install()\n" + body + "\nprint('survived')\n"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.scenario
@pytest.mark.parametrize("use", USES)
def test_the_crash_names_region_and_task(use: str) -> None:
    if use == "faulthandler enabled before":
        result = run("torch.set_num_threads(1); unmap(); kept.sum()", before="faulthandler.enable()")
    else:
        result = run(USES[use])
    assert result.returncode == -signal.SIGSEGV
    assert "survived" not in result.stdout
    state = "closed" if use == "region closed" else "unmapped after decode[3]"
    assert f"is in region `rollout_kv`, {state}\n" in result.stderr
    assert result.stderr.count("rollplex: address 0x") == 1
    assert "hint: something kept a tensor" in result.stderr
    if use.startswith("faulthandler"):
        assert "Fatal Python error: Segmentation fault" in result.stderr


@pytest.mark.scenario
def test_other_crashes_stay_as_they_are() -> None:
    elsewhere = run("ctypes.string_at(8, 1)")
    assert (elsewhere.returncode, elsewhere.stderr) == (-signal.SIGSEGV, "")
    for sender in (
        "os.kill(os.getpid(), 11)",
        "import subprocess; subprocess.run(['kill', '-SEGV', str(os.getpid())])",
    ):
        sent = run(f"{sender}\nimport time; time.sleep(1)\n{sender}; time.sleep(5)")
        assert sent.returncode == -signal.SIGSEGV
        assert "rollout_kv" not in sent.stderr


@pytest.mark.scenario
def test_mapping_again_takes_the_region_out_of_the_table() -> None:
    result = run("unmap(); manager.map('rollout_kv'); kept.add_(1); print(kept[0].item(), crash.unmapped_ranges())")
    assert result.returncode == 0
    assert result.stdout == "1.0 ()\nsurvived\n"


def test_ranges_are_half_open_and_entries_replace_each_other() -> None:
    crash.mark_unmapped(4096, 10, "weights", "unmapped after update")
    crash.mark_unmapped(8192, 10, "rollout_kv", "not mapped yet")
    crash.mark_unmapped(4096, 20, "weights", "unmapped after publish")
    try:
        assert crash.explain(4095) is None
        assert crash.explain(4096 + 19) == "address 0x1013 is in region `weights`, unmapped after publish"
        assert crash.explain(4096 + 20) is None
        assert crash.explain(8192) == "address 0x2000 is in region `rollout_kv`, not mapped yet"
    finally:
        crash.forget(4096)
        crash.forget(8192)
    # Others may be there, of regions whose tensors somebody still holds.
    assert not {4096, 8192} & {found.start for found in crash.unmapped_ranges()}
