"""`rollplex report RUN`: tables on the console, pictures and a trace in the run's report folder."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rollplex_cli.core.files import read_json, read_tail
from rollplex_cli.report.bench import bench_table
from rollplex_cli.report.page.page import write_page
from rollplex_cli.report.plots import draw_curves
from rollplex_cli.report.series import (
    Row,
    RunData,
    heldout_points,
    load_run,
    number,
    printable,
    reward_means,
    steps_of,
    target_reached,
)
from rollplex_cli.report.spans import parse_spans
from rollplex_cli.report.tables import as_json, phase_table, phase_times, sample_table, task_table, task_times
from rollplex_cli.report.timeline import draw_timeline
from rollplex_cli.report.trace import write_trace

if TYPE_CHECKING:
    from rich.console import Console

NUM_SAMPLES = 4


def write_pictures(data: RunData) -> list[Path]:
    """Write curves.png and timeline.png where there is something to draw; returns what was written."""
    folder = data.folder.report_dir
    folder.mkdir(parents=True, exist_ok=True)
    curves, timeline = folder / "curves.png", folder / "timeline.png"
    written = [curves] if draw_curves(data, curves) else []
    if draw_timeline(parse_spans(data), timeline, f"A typical step: {data.name}"):
        written.append(timeline)
    return written


def render(run_dir: str | Path, console: Console, json: bool = False) -> None:
    """Report on a run: tables (or one JSON object) to `console`, files to its report folder.

    Raises UsageError where `run_dir` is no run folder. A run without a step gives empty tables and no picture.
    """
    data = load_run(Path(run_dir))
    files = write_pictures(data)
    spans = parse_spans(data)
    if spans:
        files.append(data.folder.report_dir / "trace.json")
        write_trace(spans, files[-1])
    report = describe(data)
    if report["num_steps"]:
        files.append(write_page(data, report, [path for path in files if path.suffix == ".png"]))
    if json:
        report["files"] = [str(path) for path in files]
        console.file.write(json_module.dumps(report, indent=2) + "\n")
        return
    for line in _head_lines(report):
        console.print(Text(printable(line)), soft_wrap=True)
    if report["bench"]:
        console.print(bench_table(report["bench"]))
    if report["phases"]:
        console.print(phase_table(phase_times(data.rows)))
    if spans:
        console.print(task_table(task_times(spans, data.plan)))
    samples = latest_samples(data)
    if samples:
        console.print(sample_table(samples))
    for path in files:
        console.print(Text(printable(path)), soft_wrap=True)


def describe(data: RunData) -> dict[str, Any]:
    """The report as a JSON-ready object."""
    steps = steps_of(data.rows)
    means = reward_means(steps, data.window)
    seconds = [value for value in (number(row, "step_s") for row in steps) if value is not None]
    return {
        "run": str(data.folder.root),
        "profile": data.name,
        "num_steps": len(steps),
        "window": data.window,
        "reward_first_step": means[0] if means else None,
        "reward_window_mean": means[-1] if means else None,
        "target": data.target,
        "target_reached": target_reached(data.rows, data.target, data.window),
        "heldout_accuracy": [{"step": step, "accuracy": accuracy} for step, accuracy in heldout_points(data.rows)],
        "train_s": sum(seconds),
        "phases": as_json(phase_times(data.rows)),
        "tasks": as_json(task_times(parse_spans(data), data.plan)) if data.events else [],
        "bench": read_json(data.folder.bench_result),
    }


def _head_lines(report: dict[str, Any]) -> list[str]:
    if not report["num_steps"]:
        return [f"{report['profile']}: no step is complete"]
    lines = [f"{report['profile']}: {report['num_steps']} steps in {report['train_s']:.1f} s"]
    if report["bench"]:
        return lines  # a benchmark measures time: its rewards mean nothing
    lines += [
        f"reward: first step {report['reward_first_step']:.3f}, "
        f"mean of the last {report['window']} steps {report['reward_window_mean']:.3f}",
    ]
    if report["target"] is not None:
        lines.append(f"target {report['target']:g}: {'reached' if report['target_reached'] else 'not reached'}")
    points = report["heldout_accuracy"]
    if points:
        lines.append("held-out accuracy: " + ", ".join(f"{p['accuracy']:.3f} (step {p['step']})" for p in points))
    return lines


def latest_samples(data: RunData) -> list[Row]:
    """The latest responses of the newest file with rollouts, one per question."""
    files = sorted(data.folder.rollouts_dir.glob("*.jsonl"), key=lambda path: (path.stat().st_mtime_ns, path.name))
    by_question: dict[str, Row] = {}
    # The file grows with every response of a run: its end is enough.
    for line in reversed(read_tail(files[-1], num_lines=512, max_bytes=1 << 18) if files else []):
        try:
            row = json_module.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "response" in row:
            by_question.setdefault(str(row.get("question", row.get("prompt"))), row)
    return list(by_question.values())[:NUM_SAMPLES]
