"""The words a user reads, whole."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.status import PrepareStatus, write_status
from rollplex_cli.profile.schema import TargetProfile
from rollplex_cli.report import run
from rollplex_cli.report.live import LiveView
from rollplex_cli.report.run import render

Golden = Callable[[str, str], None]
MakeRun = Callable[..., RunFolder]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The text does not depend on what the pictures look like."""

    def named(data: Any) -> list[Any]:
        return [data.folder.report_dir / "curves.png", data.folder.report_dir / "timeline.png"]

    monkeypatch.setattr(run, "write_pictures", named)


def test_golden_plain_view(
    make_run: MakeRun, append: Callable[..., None], metric_row: Callable[..., dict[str, Any]], golden: Golden
) -> None:
    folder = make_run(num_steps=0)
    out = io.StringIO()
    target = TargetProfile(reward_mean=0.8)
    console = Console(file=out, width=80, highlight=False)
    with LiveView(folder, "tiny: 1 rank", 12, target, plain=True, console=console) as view:
        for step in (1, 20, 60):
            accuracy = 0.52 if step == 60 else None
            write_status(
                folder.prepare_status,
                PrepareStatus(stage="cold_start", step=step, total=250, loss=1.5, accuracy=accuracy),
            )
            view.poll()
        write_status(folder.prepare_status, PrepareStatus(stage="done"))
        append(folder.evaluations, [{"step": 0, "heldout_accuracy": 0.58, "num_samples": 96}])
        for step in range(1, 13):
            append(folder.metrics, [metric_row(step, 12)])
            view.poll()
        append(folder.evaluations, [{"step": 12, "heldout_accuracy": 0.97, "num_samples": 96}])
    text = out.getvalue().replace(str(folder.root), "RUN")
    golden("plain_view.txt", re.sub(r"\d+\.\d+ s in all", "SECONDS s in all", text))


def test_golden_report(make_run: MakeRun, golden: Golden) -> None:
    folder = make_run()
    out = io.StringIO()
    render(folder.root, Console(file=out, width=80))
    golden("report.txt", out.getvalue().replace(str(folder.root), "RUN"))
