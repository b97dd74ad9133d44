"""Check and time the streamed optimizer on a GPU: rounding, bit-equality, device memory, and seconds against the link.

    python tools/gpu/memory/optimizer_check.py     two billion parameters, some minutes, 30 GiB of host memory
    python tools/gpu/memory/optimizer_check.py --parameters 7.6e9 --master split
    python tools/gpu/memory/optimizer_check.py --device cpu --parameters 4e6 --small 2e6 --bits 1e6    to try the script

Needs torch and numpy only. Prints a table on stdout, and one line of JSON last (also to --out FILE). Exit code 0 when
everything is equal that must be and every update is within its limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "src"))

import torch  # noqa: E402, TID253 - this runs where it is installed

from rollplex_cli.core.errors import DoesNotFitError  # noqa: E402
from rollplex_cli.core.units import MIB, format_bytes  # noqa: E402
from rollplex_cli.engines.trainer.adamw.link import LinkRates, measure_link  # noqa: E402
from rollplex_cli.engines.trainer.adamw.pipeline import staging_bytes  # noqa: E402
from rollplex_cli.engines.trainer.adamw.settings import AdamWSettings  # noqa: E402
from rollplex_cli.engines.trainer.adamw.streaming import StreamingAdamW  # noqa: E402
from rollplex_cli.engines.trainer.arena import GradientArena  # noqa: E402
from rollplex_cli.engines.weights.rounding import join_into, rounded, take_remainder  # noqa: E402
from rollplex_cli.memory.pinned import HostMemory  # noqa: E402
from rollplex_cli.memory.vmm import open_driver  # noqa: E402
from rollplex_cli.memory.vmm.host import available_bytes  # noqa: E402

LIMIT = 1.15
"""Largest ratio of an update's seconds to its bytes over the measured link rate."""
COLUMNS = 8192
MAX_ROWS = 16384
"""Of one matrix: 2^27 elements, as large as an embedding's."""
LINK_BYTES = 512 * MIB


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def open_host(device: torch.device) -> HostMemory | None:
    """Page-locked memory as a run has it; None where there are no CUDA bindings, so that PyTorch's is taken."""
    try:
        return HostMemory(open_driver(str(device)), available_bytes())
    except DoesNotFitError as error:
        print(f"page-locked memory comes from PyTorch: {error.message}")
        return None


def link_rates(device: torch.device, host: HostMemory | None) -> LinkRates | None:
    """Measured with memory of the kind that the optimizer gets; None without a GPU."""
    if device.type != "cuda":
        return None
    if host is None:
        source, target = (torch.zeros(LINK_BYTES, dtype=torch.uint8).pin_memory() for _ in range(2))
        return measure_link(device, (source, target))
    buffers = [host.allocate(f"link {i}", LINK_BYTES) for i in range(2)]
    rates = measure_link(device, (buffers[0].tensor, buffers[1].tensor))
    for buffer in buffers:
        buffer.close()
    return rates


def make_parameters(count: int, device: torch.device) -> dict[str, torch.nn.Parameter]:
    """About `count` BF16 parameters as a model has them: matrices, one of them a column range of a wider one, and a
    vector without weight decay."""
    generator = torch.Generator(device).manual_seed(0)
    params: dict[str, torch.nn.Parameter] = {}
    left = count - COLUMNS
    while left >= COLUMNS:
        rows = min(left // COLUMNS, MAX_ROWS)
        left -= rows * COLUMNS
        wide = COLUMNS + (COLUMNS // 2 if not params else 0)
        home = torch.empty(rows, wide, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)
        params[f"w{len(params)}"] = torch.nn.Parameter(home[:, wide - COLUMNS :])
    params["norm"] = torch.nn.Parameter(torch.ones(COLUMNS, dtype=torch.bfloat16, device=device))
    return params


def fill(arena: GradientArena, step: int) -> None:
    """Gradients of step `step`, of sizes that change from step to step."""
    generator = torch.Generator(arena.flat.device).manual_seed(1000 + step)
    arena.flat.normal_(0, 10.0 ** (step % 3 - 3), generator=generator)


def check_rounding(device: torch.device) -> dict[str, Any]:
    """Random and chosen float32 bits against the definition in integers, on this device and on the CPU."""
    generator = torch.Generator().manual_seed(3)
    low = torch.arange(1 << 16, dtype=torch.int64)
    corners = [(high << 16) | low for high in (0x0, 0x1, 0x7F, 0x3F80, 0x7F7F, 0x8000, 0x807F, 0xBF81, 0xFF7F)]
    chosen = torch.cat([*corners, torch.tensor([0x7F800000, 0xFF800000])])
    drawn = torch.randint(0, 1 << 32, (1 << 22,), generator=generator, dtype=torch.int64)
    bits = torch.cat([chosen, drawn])
    bits = bits[(bits & 0x7FFFFFFF) <= 0x7F800000]  # NaN is asked for below
    master = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)
    wanted = ((bits & 0x7FFFFFFF) + 0x8000 >> 16) | (bits >> 16 & 0x8000)
    on_device = master.to(device)
    weights = rounded(on_device, torch.bfloat16)
    remainder, joined = torch.empty_like(on_device, dtype=torch.int16), torch.empty_like(on_device)
    take_remainder(on_device, remainder)
    join_into(weights, remainder, joined)
    nan = torch.tensor([0x7FFFFFFF, 0x7FC00000, -1], dtype=torch.int32).view(torch.float32).to(device)
    return {
        "values": len(bits),
        "as_defined": torch.equal(weights.cpu().view(torch.int16).to(torch.int64) & 0xFFFF, wanted),
        "as_on_cpu": torch.equal(weights.cpu().view(torch.int16), rounded(master, torch.bfloat16).view(torch.int16)),
        "comes_back": torch.equal(joined.cpu().view(torch.int32), master.view(torch.int32)),
        "nan_stays": bool(rounded(nan, torch.bfloat16).isnan().all()),
    }


def check_bits(count: int, device: torch.device, host: HostMemory | None, updates: int) -> dict[str, bool]:
    """Weights and state after some updates, in one chunk with full masters, against every other way."""

    def train(**options: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        params = make_parameters(count, device)
        arena = GradientArena(params)
        settings = AdamWSettings(lr=1e-3, weight_decay=0.1, warmup_steps=3, **options)
        optimizer = StreamingAdamW(params, arena, settings, host=host)
        for step in range(updates):
            fill(arena, step)
            optimizer.step()
        found = {name: p.detach().cpu() for name, p in params.items()}, optimizer.state_dict()
        optimizer.close()
        return found

    whole = -(-2 * count // 64) * 64
    weights, state = train(chunk_elements=whole)
    results = {}
    for master in ("full", "split"):
        for chunk in (64 * 1001, 1 << 20, 1 << 24, whole):
            if master == "full" and chunk == whole:
                continue
            mine, own = train(chunk_elements=chunk, master=master)
            equal = all(torch.equal(mine[name], weights[name]) for name in weights)
            results[f"{master}, {chunk} a chunk"] = equal and all(torch.equal(own[name], state[name]) for name in state)
    start = make_parameters(count, device)
    results["the updates changed weights"] = not torch.equal(start["w0"].detach().cpu(), weights["w0"])
    return results


def time_updates(
    count: int,
    master: Any,
    chunk: int,
    device: torch.device,
    host: HostMemory | None,
    rates: LinkRates | None,
    rounds: int,
) -> dict[str, Any]:
    """Median seconds, bytes and peak device memory of updates of `count` parameters."""
    params = make_parameters(count, device)
    arena = GradientArena(params)
    settings = AdamWSettings(lr=1e-6, weight_decay=0.1, chunk_elements=chunk, master=master)
    started = time.perf_counter()
    optimizer = StreamingAdamW(params, arena, settings, host=host)
    built = time.perf_counter() - started
    seconds, whole, peak = [], [], 0
    for step in range(rounds + 1):
        fill(arena, step)
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        started = time.perf_counter()
        optimizer.step()
        synchronize(device)
        took = time.perf_counter() - started
        if device.type == "cuda":
            peak = max(peak, torch.cuda.max_memory_allocated(device) - before)
        assert optimizer.stats is not None
        if step:  # the first one warms up
            seconds.append(optimizer.stats.seconds)
            whole.append(took)
    stats = optimizer.stats
    assert stats is not None
    least = rates.seconds(stats.to_device_bytes, stats.to_host_bytes) if rates else None
    result = {
        "parameters": sum(p.numel() for p in params.values()),
        "master": master,
        "chunk_elements": chunk,
        "build_s": built,
        "update_s": statistics.median(seconds),
        "update_s_all": seconds,
        "step_s": statistics.median(whole),
        "to_device_bytes": stats.to_device_bytes,
        "to_host_bytes": stats.to_host_bytes,
        "host_bytes": optimizer.host_bytes,
        "staging_bytes": stats.staging_bytes,
        "planned_staging_bytes": staging_bytes(chunk, mode=master),
        "peak_device_bytes": peak,
        "link_s": least,
        "ratio": statistics.median(seconds) / least if least else None,
        "step_ratio": statistics.median(whole) / least if least else None,
    }
    optimizer.close()
    del optimizer, arena, params
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def main() -> int:
    """Run everything that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--parameters", type=float, default=2e9)
    parser.add_argument("--small", type=float, default=5e8, help="the other size, for the peak of device memory")
    parser.add_argument("--bits", type=float, default=5e7, help="parameters that bit-equality is checked with")
    parser.add_argument("--chunk-elements", type=int, default=1 << 24)
    parser.add_argument("--master", choices=("full", "split", "both"), default="both")
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # As a run's trainer: never on the default stream.
        torch.cuda.set_stream(torch.cuda.Stream())
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"
    print(f"{name}, torch {torch.__version__}")
    host = open_host(device)

    rates = link_rates(device, host)
    if rates is not None:
        print(
            f"link: to device {rates.to_device / 1e9:.1f} GB/s, to host {rates.to_host / 1e9:.1f}, "
            f"both at once {rates.both / 1e9:.1f}"
        )

    rounding = check_rounding(device)
    print(f"rounding: {rounding}")
    bits = check_bits(int(arguments.bits), device, host, arguments.updates)
    for what, equal in bits.items():
        print(f"bit-equal to one chunk: {what}: {equal}" if "chunk" in what else f"{what}: {equal}")

    modes = ("full", "split") if arguments.master == "both" else (arguments.master,)
    timings = []
    for master in modes:
        for count in (int(arguments.small), int(arguments.parameters)):
            row = time_updates(count, master, arguments.chunk_elements, device, host, rates, arguments.updates)
            timings.append(row)
            ratio = f"{row['ratio']:.3f} (whole step {row['step_ratio']:.3f})" if row["ratio"] else "-"
            print(
                f"{master:<6}{row['parameters'] / 1e9:7.3f} B  update {row['update_s']:.4f} s, "
                f"step {row['step_s']:.4f} s, "
                f"{format_bytes(row['to_device_bytes'])} in, {format_bytes(row['to_host_bytes'])} out, ratio {ratio}, "
                f"peak {format_bytes(row['peak_device_bytes'])} on the device, built in {row['build_s']:.1f} s",
                flush=True,
            )
    peaks = {master: [r["peak_device_bytes"] for r in timings if r["master"] == master] for master in modes}
    constant = all(len(set(values)) == 1 for values in peaks.values())
    large = [r for r in timings if r["parameters"] > arguments.small]
    within = all(r["ratio"] <= LIMIT for r in large if r["ratio"])
    print(f"peak device memory does not depend on the number of parameters: {constant}")
    print(f"updates within {LIMIT} x bytes / link rate: {within}")
    result = {
        "device": name,
        "torch": torch.__version__,
        "pinned_by": "HostMemory" if host else "torch",
        "link_bytes_per_s": {k: getattr(rates, k) for k in ("to_device", "to_host", "both")} if rates else None,
        "rounding": rounding,
        "bit_equal": bits,
        "timings": timings,
        "peak_constant": constant,
        "within_limit": within,
    }
    text = json.dumps(result)
    print(text)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n", encoding="utf-8")
    good = constant and within and all(bits.values()) and all(rounding.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
