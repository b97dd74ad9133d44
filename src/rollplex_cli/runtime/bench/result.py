"""What a benchmark's rows come to."""

from __future__ import annotations

import math
import os
import platform
import statistics
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from rollplex_cli.runtime.bench.update import summarize_updates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollplex_cli.runtime.assembly.rank import Rank
    from rollplex_cli.runtime.bench.run import Variant
    from rollplex_cli.runtime.sharing.calibrate import Measurement

Rows = dict[str, list[dict[str, Any]]]
STUDENT_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom."""
PEAKS = ("peak_bytes", "driver_peak_bytes")
"""The most that a variant's steps were given, and that the driver counted, with PyTorch's cache of other variants."""
GEMM_SIZE, GEMM_TIMES = 8192, 20
LAUNCHES, LAUNCH_BATCHES = 200, 9
"""Fewer at once than a device's queue holds: a full one would be waited for."""


def build_result(
    rank: Rank, variants: Sequence[Variant], rows: Rows, workload: str, measured: Sequence[Measurement]
) -> dict[str, Any]:
    """The contents of bench_result.json for one workload."""
    bound = _bound_s(rank, rows)
    efficiency = {m.batch: max(o.efficiency for o in measured if o.batch == m.batch) for m in measured}
    return {
        "results": [
            {**_summary(variant, rows, workload, bound, efficiency), "layout": _layout(rank)} for variant in variants
        ],
        "hardware": _hardware(rank),
        "ranks": rank.peers.world_size,
        "model": rank.profile.model.config,
        "pairs": len(rows[variants[0].name]),
        "bound_s": bound,
        "launch_us": launch_us("cuda" if torch.cuda.is_available() else "cpu"),
        "update": summarize_updates(row for own in rows.values() for row in own),
        "co_run": [asdict(m) for m in measured],
        "choices": [asdict(c) for c in rank.sharing.choices],
        "commit": _first_line(rank, "git"),
        "command": _first_line(rank, "command"),
        "raw": {name: [_raw(row) for row in own] for name, own in rows.items()},
    }


def _layout(rank: Rank) -> dict[str, int]:
    """Ranks by role, and degrees."""
    topology = rank.team.topology
    return {
        "training_ranks": sum(place.trains for place in topology.places),
        "rollout_ranks": sum(place.decodes for place in topology.places),
        "train_tp": topology.train_tp,
        "rollout_tp": topology.rollout_tp,
    }


def _raw(row: dict[str, Any]) -> dict[str, Any]:
    names = ("step_s", "phase_s", "loss", "grad_norm", "logprob_diff_mean", *PEAKS, "response_tokens_mean")
    return {name: row.get(name) for name in (*names, "prompt_tokens", "device_allocations")}


def _summary(
    variant: Variant, rows: Rows, workload: str, bound: float | None, efficiency: dict[int, float]
) -> dict[str, Any]:
    own = rows[variant.name]
    times = [r["step_s"] for r in own]
    phases = sorted({phase for r in own for phase in r["phase_s"]})
    tokens = [sum(r["prompt_tokens"]) + r["response_tokens_mean"] * _responses(r) for r in own]
    middle = statistics.median(times)
    return {
        "workload": workload,
        "variant": variant.name,
        "schedule": variant.schedule,
        "policy": variant.policy,
        "step_s_median": middle,
        "step_s_spread": [min(times), max(times)],
        "phase_s": {p: statistics.median(r["phase_s"].get(p, 0.0) for r in own) for p in phases},
        **compare(variant.name, rows),
        "co_run_efficiency": efficiency or None,
        **{name: max((r[name] for r in own if r.get(name)), default=None) for name in PEAKS},
        "bound_ratio": middle / bound if bound else None,
        "tokens_per_s": statistics.median(n / t for n, t in zip(tokens, times, strict=True)),
        "response_tokens_mean": statistics.median(r["response_tokens_mean"] for r in own),
        "logprob_diff_mean": statistics.median(r["logprob_diff_mean"] for r in own),
    }


def compare(name: str, rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Step times of every other variant over this one's: a ratio per pair, then its median, spread and interval. Both
    steps of a pair had the same prompts and response lengths."""
    ratios = {
        other: [theirs["step_s"] / mine["step_s"] for theirs, mine in zip(rows[other], rows[name], strict=True)]
        for other in rows
        if other != name
    }
    return {
        "ratio": {other: statistics.median(values) for other, values in ratios.items()},
        "ratio_spread": {other: [min(values), max(values)] for other, values in ratios.items()},
        "ratio_ci95": {other: ratio_interval(values) for other, values in ratios.items()},
    }


def _responses(row: dict[str, Any]) -> int:
    return int(row["num_responses"])


def ratio_interval(ratios: Sequence[float]) -> list[float] | None:
    """95 % confidence interval of the geometric mean of ratios over pairs; None for one pair.

    Student's t on the logarithms: the drift that both steps of a pair share cancels in a pair's ratio, and speed-ups
    and slow-downs of the same factor weigh the same.
    """
    if len(ratios) < 2:
        return None
    logs = [math.log(r) for r in ratios]
    quantile = STUDENT_95[min(len(logs) - 2, len(STUDENT_95) - 1)]
    half = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return [math.exp(statistics.mean(logs) - half), math.exp(statistics.mean(logs) + half)]


def _bound_s(rank: Rank, rows: Rows) -> float | None:
    """No step is shorter than max(decode alone, operations / the measured rate of matrix products).

    Decode alone is the GENERATE phase of `colocate`, prefill included. Operations: 2 per parameter and token of a
    forward, 4 of a backward; attention is left out, so the bound is low. None without a GPU or that baseline.
    """
    if "colocate" not in rows or not torch.cuda.is_available():
        return None
    own = rows["colocate"]
    decode = statistics.median(r["phase_s"]["GENERATE"] for r in own)
    params = sum(p.numel() for name, p in rank.engines.actor.named_parameters().items() if "visual" not in name)
    # A training group trains its share of a step's prompts.
    groups = rank.team.topology.data_parallel
    prompts = statistics.median(sum(r["prompt_tokens"]) for r in own) / groups
    responses = statistics.median(r["response_tokens_mean"] * _responses(r) for r in own) / groups
    reference = 1 if rank.engines.reference is not None else 0
    # Prefix: rollout, reference, actor, its recomputation and backward. Suffix: reference, actor and backward.
    forwards = prompts * (1 + reference + 1 + 1 + 2) + responses * (reference + 1 + 2)
    return float(max(decode, 2 * params * forwards / _matrix_rate()))


def _matrix_rate() -> float:
    """Operations a second of a large BF16 matrix product of random numbers."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(GEMM_TIMES):
        a @ b
    end.record()
    end.synchronize()
    return float(2 * GEMM_SIZE**3 * GEMM_TIMES / (start.elapsed_time(end) / 1000))


def launch_us(device: str) -> float:
    """Microseconds of this host to issue one small operation, the median over LAUNCH_BATCHES batches. A training task
    is some thousands of them, and no shorter than that whatever the device does."""
    x = torch.zeros(1, device=device)
    found = []
    for _ in range(LAUNCH_BATCHES):
        if device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(LAUNCHES):
            x.add_(1.0)
        found.append((time.perf_counter() - begun) / LAUNCHES * 1e6)
    return statistics.median(found)


def _hardware(rank: Rank) -> str:
    if torch.cuda.is_available():
        return f"{rank.peers.world_size} x {torch.cuda.get_device_name(0)}, torch {torch.__version__}"
    return f"{os.cpu_count()} CPU cores, {platform.machine()}, {rank.profile.runtime.torch_threads} thread(s) a lane"


def _first_line(rank: Rank, what: str) -> str:
    path = getattr(rank.run, what)
    return path.read_text(encoding="utf-8").splitlines()[0] if path.exists() else "unknown"
