from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.status import PrepareStatus, RankStatus, write_status
from rollplex_cli.profile.dump import resolved_yaml
from rollplex_cli.profile.load import load_profile
from rollplex_cli.profile.schema import TargetProfile
from rollplex_cli.report import live, run
from rollplex_cli.report.live import LiveView
from rollplex_cli.report.watch import JsonlTail

MakeRun = Callable[..., RunFolder]
Append = Callable[..., None]
MakeRow = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second, and few tests look at pictures."""
    monkeypatch.setattr(run, "write_pictures", lambda _data: [])


def plain_view(folder: RunFolder, out: io.StringIO, target: float | None = 0.92, total: int = 30) -> LiveView:
    console = Console(file=out, width=80, highlight=False)
    goal = TargetProfile(reward_mean=target) if target is not None else None
    return LiveView(folder, "tiny [/answer]", total, goal, plain=True, console=console)


@pytest.fixture(autouse=True)
def capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever terminal the tests run under."""
    monkeypatch.setenv("TERM", "xterm-256color")


def terminal_view(folder: RunFolder, out: io.StringIO, width: int = 80) -> LiveView:
    console = Console(file=out, width=width, height=40, force_terminal=True, highlight=False)
    return LiveView(folder, "tiny", 30, TargetProfile(reward_mean=0.92), console=console)


def without_codes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def last_frame(text: str) -> str:
    return without_codes(re.split(r"(?:\x1b\[1A\x1b\[2K)+", text)[-1])


def test_plain_view_says_each_step_once(make_run: MakeRun, append: Append, metric_row: MakeRow) -> None:
    folder = make_run(num_steps=0)
    out = io.StringIO()
    with plain_view(folder, out) as view:
        for step in (1, 2, 3):
            append(folder.metrics, [metric_row(step, 30) | ({"skipped_samples": 4} if step == 3 else {})])
            view.poll()
            view.poll()
    lines = out.getvalue().splitlines()
    assert lines[0] == "tiny [/answer]"
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/30", "2/30", "3/30"]
    assert "KL 0.002" in out.getvalue()
    assert out.getvalue().count("left out 4") == 1


def test_plain_view_of_a_resumed_run_says_new_steps_only(
    make_run: MakeRun, append: Append, metric_row: MakeRow
) -> None:
    folder = make_run(num_steps=4)
    out = io.StringIO()
    with plain_view(folder, out) as view:
        append(folder.metrics, [metric_row(5, 30)])
        view.poll()
    assert [line.split()[1] for line in out.getvalue().splitlines() if line.startswith("step ")] == ["5/30"]


def test_preparation_is_shown_and_the_cold_start_named(make_run: MakeRun, append: Append, metric_row: MakeRow) -> None:
    folder = make_run(num_steps=0)
    out = io.StringIO()
    with plain_view(folder, out) as view:
        for status in (
            PrepareStatus(stage="render", step=10, total=512),
            PrepareStatus(stage="cold_start", step=100, total=250, loss=0.5, accuracy=0.52, message="[/x]\x1b[31m"),
            PrepareStatus(stage="done"),
        ):
            write_status(folder.prepare_status, status)
            view.poll()
        append(folder.metrics, [metric_row(1, 30)])
    text = out.getvalue()
    assert "rendering clips 10/512" in text
    assert "supervised cold start 100/250: loss 0.500, sampled accuracy 0.52, [/x]\\x1b[31m" in text
    assert "RL began after a supervised cold start (sampled accuracy 0.52)" in text
    assert "\x1b" not in text


@pytest.mark.parametrize(
    ("target", "words"), [(0.6, "Target reached"), (0.99, "Target not reached"), (None, "-step mean")]
)
def test_summary_says_what_was_reached(make_run: MakeRun, target: float | None, words: str) -> None:
    folder = make_run()
    out = io.StringIO()
    with plain_view(folder, out, target):
        pass
    text = out.getvalue()
    assert words in text
    assert "Held-out accuracy: 0.580 -> 0.970 (greedy on 96 samples" in text
    assert f"rollplex report {folder.root}" in text
    assert f"rollplex export {folder.root}" in text


def test_summary_draws_pictures(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    folder = make_run()
    out = io.StringIO()
    with plain_view(folder, out):
        pass
    assert f"Pictures: {folder.report_dir / 'curves.png'}" in out.getvalue()
    assert (folder.report_dir / "curves.png").exists()
    assert (folder.report_dir / "timeline.png").exists()


def test_no_pictures_where_the_profile_wants_none(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    folder = make_run()
    folder.profile.write_text(resolved_yaml(load_profile("tiny", ["logging.pictures=false"])), encoding="utf-8")
    out = io.StringIO()
    with plain_view(folder, out):
        pass
    assert "Pictures" not in out.getvalue()
    assert not folder.report_dir.exists() or not list(folder.report_dir.iterdir())


def test_a_picture_that_cannot_be_drawn_fails_no_run(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_data: object) -> None:
        raise OSError("disk full [/x]")

    monkeypatch.setattr(run, "write_pictures", broken)
    out = io.StringIO()
    with plain_view(make_run(), out):
        pass
    assert "Pictures could not be drawn: OSError: disk full [/x]" in out.getvalue()


def test_evaluations_are_said(make_run: MakeRun, append: Append) -> None:
    folder = make_run(num_steps=0)
    out = io.StringIO()
    with plain_view(folder, out) as view:
        append(folder.evaluations, [{"step": 0, "heldout_accuracy": 0.5, "num_samples": 96}])
        view.poll()
    assert out.getvalue().splitlines()[1] == "held-out accuracy after step 0: 0.500 (96 samples)"


def test_a_run_that_went_back_to_a_checkpoint_says_its_steps_again(
    make_run: MakeRun, append: Append, metric_row: MakeRow
) -> None:
    folder = make_run(num_steps=4)
    out = io.StringIO()
    with plain_view(folder, out) as view:
        draft = folder.root / "draft"
        append(draft, [metric_row(1, 30), metric_row(2, 30)])
        draft.replace(folder.metrics)
        view.poll()
        append(folder.metrics, [metric_row(3, 30)])
        view.poll()
    assert [line.split()[1] for line in out.getvalue().splitlines() if line.startswith("step ")] == ["3/30"]
    assert "after 3 steps" in out.getvalue()


def test_a_benchmark_is_not_judged_by_its_reward(make_run: MakeRun) -> None:
    folder = make_run(num_steps=4, both=True)
    folder.bench.write_text('{"baselines": ["colocate"]}', encoding="utf-8")
    out = io.StringIO()
    with plain_view(folder, out):
        pass
    assert "Target" not in out.getvalue()
    assert "export" not in out.getvalue()


def test_summary_of_a_broken_off_run_tells_how_to_resume(make_run: MakeRun) -> None:
    folder = make_run(num_steps=3)
    out = io.StringIO()
    with pytest.raises(RuntimeError, match="lost"), plain_view(folder, out):
        raise RuntimeError("lost")
    assert f"rollplex train --resume --run-dir {folder.root}" in out.getvalue()
    assert "export" not in out.getvalue()


def test_summary_of_a_run_that_never_started_is_the_folder(make_run: MakeRun) -> None:
    folder = make_run(num_steps=0)
    out = io.StringIO()
    with plain_view(folder, out):
        pass
    assert out.getvalue().splitlines()[-1] == f"Run folder: {folder.root}"
    assert not list(folder.report_dir.iterdir())


def test_terminal_view_fits_80_columns(make_run: MakeRun) -> None:
    folder = make_run()
    out = io.StringIO()
    with terminal_view(folder, out) as view:
        view.poll()
    frame = last_frame(out.getvalue())
    table = [line for line in frame.splitlines() if re.match(r"\s+\d+ \d\.\d", line)]
    assert [int(line.split()[0]) for line in table] == list(range(19, 31))
    assert all(len(line.rstrip()) <= 80 for line in table)
    # A cell that did not fit would end in an ellipsis.
    assert "\u2026" not in "".join(table)
    assert "0.980" not in frame
    assert "10-step mean 0." in frame


def test_terminal_view_leaves_out_columns_without_values(make_run: MakeRun) -> None:
    folder = make_run(kl=False)
    out = io.StringIO()
    with terminal_view(folder, out) as view:
        view.poll()
    assert " KL " not in last_frame(out.getvalue())


def test_a_silent_run_shows_what_ranks_wait_for(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_run(num_steps=2)
    waiting = ["actor_suffix[3]: reward[3] \x1b[2J[/x]"]
    write_status(folder.status(0), RankStatus(rank=0, state="running", phase="LEARN", waiting=waiting))
    out = io.StringIO()
    with terminal_view(folder, out, width=120) as view:
        now = time.monotonic()
        monkeypatch.setattr(live.time, "monotonic", lambda: now + 60)
        view.poll()
        text = without_codes(out.getvalue())
    assert "rank 0 waits for actor_suffix[3]: reward[3] \\x1b[2J[/x]" in text


def test_the_cursor_comes_back_when_the_run_fails(make_run: MakeRun) -> None:
    folder = make_run(num_steps=2)
    out = io.StringIO()
    with pytest.raises(RuntimeError, match="lost"), terminal_view(folder, out):
        raise RuntimeError("lost")
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1


def test_a_pipe_gets_no_terminal_codes(make_run: MakeRun) -> None:
    folder = make_run(num_steps=2)
    out = io.StringIO()
    console = Console(file=out, width=80)
    with LiveView(folder, "tiny", 30, TargetProfile(reward_mean=0.92), console=console) as view:
        view.poll()
    assert "\x1b" not in out.getvalue()


def test_tail_reads_a_line_only_when_it_is_whole(make_run: MakeRun) -> None:
    path = make_run(num_steps=0).metrics
    tail = JsonlTail(path)
    path.unlink(missing_ok=True)
    assert tail.read_new() == []
    path.write_text('{"step": 1}\n{"step"', encoding="utf-8")
    assert tail.read_new() == [{"step": 1}]
    assert tail.read_new() == []
    with path.open("a", encoding="utf-8") as stream:
        stream.write(': 2}\nbroken\n{"step": 3}\n')
    assert tail.read_new() == [{"step": 2}, {"step": 3}]
    path.write_text('{"step": 9}\n', encoding="utf-8")
    assert tail.read_new() == [{"step": 9}]
