"""What this machine has, found without loading any GPU library."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from rollplex_cli.core.units import KIB, MIB
from rollplex_cli.launch.subprocess import run_text
from rollplex_cli.plan.fit import Machine

MEMINFO = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def detect_machine(*, look_for_gpus: bool = True) -> Machine:
    """GPUs that `nvidia-smi` shows and CUDA_VISIBLE_DEVICES allows, and this node's memory."""
    return Machine(gpu_bytes=_gpus() if look_for_gpus else (), host_bytes=_host_bytes())


def parse_gpus(text: str, visible: str | None) -> tuple[int, ...]:
    """Bytes per GPU from `index, uuid, MiB` rows, restricted to a CUDA_VISIBLE_DEVICES value (None: all)."""
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.count(",") == 2]
    sizes = {row[0]: int(row[2]) * MIB for row in rows if row[2].isdigit()}
    if visible is None:
        return tuple(sizes.values())
    uuids = {row[1]: row[0] for row in rows}
    chosen = []
    for name in (part.strip() for part in visible.split(",")):
        by_uuid = [index for uuid, index in uuids.items() if name and uuid.startswith(name)]
        size = sizes.get(name, sizes.get(by_uuid[0]) if by_uuid else None)
        if size is None:
            # CUDA ignores the list from the first entry that it does not know.
            break
        chosen.append(size)
    return tuple(chosen)


def _gpus() -> tuple[int, ...]:
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    return parse_gpus(run_text(query) or "", os.environ.get("CUDA_VISIBLE_DEVICES"))


def _host_bytes() -> int | None:
    sizes = []
    with contextlib.suppress(OSError, StopIteration, ValueError):
        total = next(line for line in MEMINFO.read_text().splitlines() if line.startswith("MemTotal:"))
        sizes.append(int(total.split()[1]) * KIB)
    with contextlib.suppress(OSError, ValueError):
        # "max" without a limit
        sizes.append(int(CGROUP_LIMIT.read_text()))
    return min(sizes) if sizes else None
