from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.report.run import render
from rollplex_cli.report.series import load_run
from rollplex_cli.report.tables import phase_times

MakeRun = Callable[..., RunFolder]
PNG = b"\x89PNG\r\n\x1a\n"


def report(root: Path, *, terminal: bool = False, as_json: bool = False) -> str:
    out = io.StringIO()
    render(root, Console(file=out, width=110, force_terminal=terminal), json=as_json)
    return out.getvalue()


def picture_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == PNG
    return int.from_bytes(header[16:20], "big"), int.from_bytes(header[20:24], "big")


def test_report_prints_tables_and_writes_files(make_run: MakeRun) -> None:
    folder = make_run()
    text = report(folder.root)
    assert "tiny: 30 steps" in text
    assert "held-out accuracy: 0.580 (step 0), 0.970 (step 30)" in text
    for word in ("GENERATE", "actor_prefix_backward", "beside decode"):
        assert word in text
    assert picture_size(folder.report_dir / "curves.png")[0] > 1000
    assert picture_size(folder.report_dir / "timeline.png")[0] > 1000
    assert json.loads((folder.report_dir / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


def test_a_benchmark_is_reported_by_its_times(make_run: MakeRun) -> None:
    folder = make_run()
    row = {"workload": "star", "variant": "rollplex", "step_s_median": 1.25, "ratio": {"colocate": 1.5}}
    folder.bench_result.write_text(json.dumps({"results": [row]}), encoding="utf-8")
    text = report(folder.root)
    assert "workload star" in text and "times colocate's speed" in text and "1.50" in text
    assert "reward: first step" not in text
    assert json.loads(report(folder.root, as_json=True))["bench"] == {"results": [row]}


def test_two_schedules_make_a_taller_timeline(make_run: MakeRun) -> None:
    one = make_run()
    report(one.root)
    height = picture_size(one.report_dir / "timeline.png")[1]
    both = make_run(both=True)
    report(both.root)
    assert picture_size(both.report_dir / "timeline.png")[1] > 1.5 * height


def test_json_is_one_document(make_run: MakeRun) -> None:
    folder = make_run()
    document = json.loads(report(folder.root, as_json=True))
    assert document["num_steps"] == 30
    assert document["target"] == pytest.approx(load_run(folder.root).target)
    assert document["heldout_accuracy"][-1] == {"step": 30, "accuracy": 0.97}
    assert {row["phase"] for row in document["phases"]} == {"GENERATE", "LEARN", "UPDATE", "PUBLISH", "other"}
    assert all(Path(path).exists() for path in document["files"])


def test_tasks_stand_beside_the_plan(make_run: MakeRun) -> None:
    tasks = {row["task"]: row for row in json.loads(report(make_run().root, as_json=True))["tasks"]}
    assert (tasks["decode"]["planned"], tasks["decode"]["per_step"]) == (8, 8)
    assert (tasks["actor_suffix"]["planned"], tasks["actor_suffix"]["per_step"]) == (9, 8)
    assert tasks["update"]["planned"] is None


def test_phase_shares_sum_to_one(make_run: MakeRun) -> None:
    times = phase_times(load_run(make_run().root).rows)
    assert sum(row.share for row in times) == pytest.approx(1.0)
    assert next(row for row in times if row.phase == "LEARN").median_s == pytest.approx(0.35)


def test_a_run_without_kl_is_drawn(make_run: MakeRun) -> None:
    folder = make_run(kl=False)
    with_kl = "KL" in report(folder.root)
    assert not with_kl
    assert picture_size(folder.report_dir / "curves.png")[0] > 1000


def test_a_run_of_one_step_is_drawn(make_run: MakeRun) -> None:
    folder = make_run(num_steps=1)
    assert "1 steps" in report(folder.root)
    assert picture_size(folder.report_dir / "curves.png")[0] > 1000


def test_an_empty_run_says_so(make_run: MakeRun) -> None:
    folder = make_run(num_steps=0)
    assert "no step is complete" in report(folder.root)
    assert list(folder.report_dir.iterdir()) == []
    document = json.loads(report(folder.root, as_json=True))
    assert document["num_steps"] == 0
    assert document["files"] == []


def test_a_run_without_a_readable_profile_is_reported(make_run: MakeRun) -> None:
    folder = make_run(profile=False)
    assert "run: 30 steps" in report(folder.root)
    folder.profile.write_text("nonsense: [", encoding="utf-8")
    assert "run: 30 steps" in report(folder.root)


def test_torn_lines_are_left_out(make_run: MakeRun) -> None:
    folder = make_run(num_steps=5)
    with folder.metrics.open("a", encoding="utf-8") as stream:
        stream.write('{"step": 6, "reward_mean": 0.9}\n{"step": 7, "rew\n[1]\n{"step": 8, "reward_me')
    with folder.events(0).open("ab") as stream:
        stream.write(b'{"name": "decode", "t0": 1.0, \xff')
    assert "6 steps" in report(folder.root)


def test_hostile_text_reaches_the_terminal_harmless(make_run: MakeRun, append: Callable[..., None]) -> None:
    folder = make_run(num_steps=2)
    rows: list[dict[str, Any]] = [
        {"step": 2, "question": "[/answer] [bold]?", "response": "<a>[/answer]\x1b]0;pwned\x07\x1b[2J", "reward": 1.0},
        {"step": 2, "prompt": "[link=x]", "response": "[red]left[/red]", "reward": None},
    ]
    append(folder.rollouts_dir / "step2.jsonl", rows)
    text = report(folder.root, terminal=True)
    assert "[/answer] [bold]?" in text
    assert "<a>[/answer]\\x1b]0;pwned\\x07\\x1b[2J" in text
    assert "[red]left[/red]" in text
    assert "\x1b]0;" not in text
    assert "\x1b[2J" not in text
    assert "\x07" not in text
