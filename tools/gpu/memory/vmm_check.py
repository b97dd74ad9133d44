"""Check and time virtual memory on a machine with a GPU: the property tests on the CUDA driver, then costs.

    python tools/gpu/memory/vmm_check.py                    all of it, about two minutes on one GPU with 24 GiB free
    python tools/gpu/memory/vmm_check.py --no-tests         costs only
    python tools/gpu/memory/vmm_check.py --device cpu --kv-gib 0.25    the same over the host driver, to try it

Prints a table on stdout, and one line of JSON last. Exit code 0 when the tests pass and the swap is within its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402, TID253 - this runs where it is installed

from rollplex_cli.core.units import GIB, MIB, format_bytes  # noqa: E402
from rollplex_cli.memory import crash  # noqa: E402
from rollplex_cli.memory.manager import MemoryManager  # noqa: E402
from rollplex_cli.memory.regions import Content  # noqa: E402
from rollplex_cli.memory.vmm import open_driver  # noqa: E402

SWAP_LIMIT_MS_PER_20_GIB = 50.0
USE_AFTER_UNMAP = "--use-after-unmap"


class Costs:
    """Milliseconds by name, each the median of three."""

    def __init__(self) -> None:
        self.rows: dict[str, float] = {}

    def add(self, name: str, seconds: list[float], num_bytes: int = 0) -> None:
        """Enter and print the median; with `num_bytes` also the rate."""
        middle = sorted(seconds)[len(seconds) // 2]
        self.rows[name] = middle * 1000
        rate = f"  {num_bytes / middle / 1e9:8.1f} GB/s" if num_bytes else ""
        print(f"{name:<58}{middle * 1000:10.3f} ms{rate}", flush=True)


def clock(action: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, and what it gave."""
    start = time.perf_counter()
    result = action()
    return time.perf_counter() - start, result


def time_primitives(driver: Any, costs: Costs, total: int, piece: int) -> None:
    """`total` bytes as handles of `piece` bytes, each primitive on its own."""
    title = f"{format_bytes(total)} as {total // piece} x {format_bytes(piece)}"
    seconds: dict[str, list[float]] = {name: [] for name in ("reserve", "create", "map", "access", "unmap", "release")}
    for _ in range(3):
        taken, address = clock(lambda: driver.reserve(total, driver.granularity))
        seconds["reserve"].append(taken)
        taken, handles = clock(lambda: [driver.create(piece) for _ in range(total // piece)])
        seconds["create"].append(taken)
        places = [(address + index * piece, handle) for index, handle in enumerate(handles)]
        seconds["map"].append(clock(lambda places=places: [driver.map(at, piece, it) for at, it in places])[0])
        seconds["access"].append(clock(lambda address=address: driver.set_access(address, total))[0])
        seconds["unmap"].append(clock(lambda places=places: [driver.unmap(at, piece) for at, _ in places])[0])
        seconds["release"].append(clock(lambda handles=handles: [driver.release(it, piece) for it in handles])[0])
        driver.free(address, total)
    for name, values in seconds.items():
        costs.add(f"{title}: {name}", values)


def time_swap(manager: MemoryManager, costs: Costs, kv_bytes: int) -> float:
    """Unmap and map of a KV pool, as the end and the start of GENERATE do it. Gives milliseconds for 20 GiB."""
    region = manager.region("rollout_kv", kv_bytes)
    region.place("k_buffer", (kv_bytes // 2,), torch.bfloat16)
    manager.map("rollout_kv")
    pool = region.tensor("k_buffer")
    unmaps, maps = [], []
    for round_number in range(3):
        pool.fill_(round_number)
        synchronize(manager)
        before = manager.memory.free_bytes()
        unmaps.append(clock(lambda: manager.unmap("rollout_kv", after="decode"))[0])
        freed = manager.memory.free_bytes() - before
        assert freed == region.size_bytes, f"unmap freed {freed} of {region.size_bytes} bytes"
        maps.append(clock(lambda: manager.map("rollout_kv"))[0])
    pool.fill_(7)
    assert bool(pool[-1] == 7)
    assert pool.data_ptr() == region.address
    costs.add(f"KV pool of {format_bytes(kv_bytes)}: unmap", unmaps)
    costs.add(f"KV pool of {format_bytes(kv_bytes)}: map", maps)
    manager.close_region("rollout_kv")
    return (sorted(unmaps)[1] + sorted(maps)[1]) * 1000 * 20 * GIB / kv_bytes


def time_saved_content(manager: MemoryManager, costs: Costs, num_bytes: int) -> None:
    """Weights that go to the host and come back."""
    region = manager.region("weights", num_bytes, content=Content.SAVED)
    region.place("all", (num_bytes // 2,), torch.bfloat16)
    manager.map("weights")
    region.tensor("all").normal_()
    check = region.tensor("all")[:: 4096 * 7].clone()
    first = clock(lambda: manager.unmap("weights", after="first"))[0]
    costs.add(f"weights of {format_bytes(num_bytes)}: first unmap, pins the copy", [first], num_bytes)
    saves, restores = [], []
    for _ in range(3):
        restores.append(clock(lambda: manager.map("weights"))[0])
        saves.append(clock(lambda: manager.unmap("weights", after="again"))[0])
    manager.map("weights")
    assert bool(region.tensor("all")[:: 4096 * 7].equal(check)), "saved content differs"
    costs.add(f"weights of {format_bytes(num_bytes)}: unmap with save", saves, num_bytes)
    costs.add(f"weights of {format_bytes(num_bytes)}: map with restore", restores, num_bytes)
    manager.close_region("weights")


def synchronize(manager: MemoryManager) -> None:
    """Wait for the device."""
    if manager.memory.driver.device != "cpu":
        torch.cuda.synchronize()


def use_after_unmap(device: str) -> None:
    """What a kept tensor does to its process. Ends it, if the rules hold."""
    crash.install()
    manager = MemoryManager(open_driver(device), budget_bytes=GIB, host_budget_bytes=0)
    manager.region("rollout_kv", 64 * MIB).place("k_buffer", (MIB,), torch.float32)
    manager.map("rollout_kv")
    kept = manager.get("rollout_kv").tensor("k_buffer").fill_(1)
    synchronize(manager)
    manager.unmap("rollout_kv", after="decode[3]")
    try:
        print("SURVIVED", float(kept.sum()))
    except Exception as error:
        ranges = "; ".join(f"`{entry.region}`, {entry.state}" for entry in crash.unmapped_ranges())
        print(f"{type(error).__name__}: {str(error).splitlines()[0]}; unmapped now: {ranges}")
        sys.exit(9)


def run_use_after_unmap(device: str) -> str:
    """The last words of a child that uses a tensor after unmap."""
    child = subprocess.run(
        [sys.executable, __file__, "--device", device, USE_AFTER_UNMAP],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    words = (child.stdout + child.stderr).strip().splitlines()
    line = next((line for line in words if "rollout_kv" in line), words[-1] if words else "")
    return f"exit code {child.returncode}: {line}"


def run_tests(device: str) -> int:
    """The property suite on this device. Gives pytest's exit code."""
    marker = "gpu" if device.startswith("cuda") else "not gpu and not scenario"
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, "-p", "no:cacheprovider", "tests/memory"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    """Run everything that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--kv-gib", type=float, default=20.0, help="size of the KV pool that is swapped")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument(USE_AFTER_UNMAP, action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.use_after_unmap:
        use_after_unmap(arguments.device)
        return 0
    kv_bytes = int(arguments.kv_gib * GIB)
    small = kv_bytes < 20 * GIB
    tests = None if arguments.no_tests else run_tests(arguments.device)
    costs = Costs()
    driver = open_driver(arguments.device)
    unit = MIB if small else GIB
    print(f"\n{arguments.device}, granularity {driver.granularity} bytes, torch {torch.__version__}")
    for total, piece in ((unit, unit), (unit, unit // 16), (unit, unit // 64), (unit, unit // 512), (16 * unit, unit)):
        time_primitives(driver, costs, total, max(piece, driver.granularity))
    manager = MemoryManager(driver, budget_bytes=2 * kv_bytes, host_budget_bytes=kv_bytes)
    swap_ms = time_swap(manager, costs, kv_bytes)
    time_saved_content(manager, costs, kv_bytes // 5)
    manager.check()
    manager.close()
    words = run_use_after_unmap(arguments.device)
    print(f"use after unmap: {words}")
    print(f"unmap + map of the KV pool, for 20 GiB: {swap_ms:.1f} ms (limit {SWAP_LIMIT_MS_PER_20_GIB:g} ms)")
    within = swap_ms <= SWAP_LIMIT_MS_PER_20_GIB or arguments.device == "cpu"
    result = {
        "device": torch.cuda.get_device_name() if arguments.device != "cpu" else platform.processor() or "cpu",
        "torch": torch.__version__,
        "tests_exit_code": tests,
        "swap_20_gib_ms": round(swap_ms, 2),
        "within_limit": within,
        "use_after_unmap": words,
        "costs_ms": {name: round(value, 4) for name, value in costs.rows.items()},
    }
    print(json.dumps(result))
    return 0 if within and not tests else 1


if __name__ == "__main__":
    sys.exit(main())
