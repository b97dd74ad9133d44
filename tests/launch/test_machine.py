from __future__ import annotations

import os
from pathlib import Path

import pytest

from rollplex_cli.core.units import MIB
from rollplex_cli.launch.machine import detect_machine, parse_gpus

SMI = "0, GPU-aaa, 81559\n1, GPU-bbb, 40960\n2, GPU-ccc, [N/A]\n"


@pytest.mark.parametrize(
    ("visible", "mib"),
    [
        (None, (81559, 40960)),
        ("1", (40960,)),
        ("1,0", (40960, 81559)),
        ("GPU-b", (40960,)),
        ("", ()),
        ("-1", ()),
        ("0,7,1", (81559,)),
        ("NoDevFiles", ()),
    ],
)
def test_visible_gpus(visible: str | None, mib: tuple[int, ...]) -> None:
    assert parse_gpus(SMI, visible) == tuple(size * MIB for size in mib)


def test_no_driver_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = detect_machine()
    assert machine.gpu_bytes == ()
    assert machine.host_bytes is not None
    assert 0 < machine.host_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 0, GPU-aaa, 143771\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert detect_machine().gpu_bytes == (143771 * MIB,)
    assert detect_machine(look_for_gpus=False).gpu_bytes == ()
