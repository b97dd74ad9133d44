from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rollplex_cli.core.events import EventWriter, read_events


def test_span_has_times_place_and_added_fields(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "events" / "rank3.jsonl", rank=3)
    with writer.span("decode", step=1, phase="GENERATE", lane="rollout", group=7) as extra:
        extra["num_tokens"] = 12
    [event] = read_events(tmp_path / "events" / "rank3.jsonl")
    assert event["t1"] >= event["t0"] > 1.6e9
    assert {key: event[key] for key in ("name", "step", "phase", "lane", "group", "rank", "num_tokens")} == {
        "name": "decode", "step": 1, "phase": "GENERATE", "lane": "rollout", "group": 7, "rank": 3, "num_tokens": 12,
    }  # fmt: skip
    assert "error" not in event


def test_span_of_a_failing_block_is_written_with_its_error_and_the_error_goes_on(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "e.jsonl", rank=0)
    with pytest.raises(KeyError), writer.span("reward", step=0, phase="GENERATE", lane="host"):
        raise KeyError("answer")
    [event] = read_events(tmp_path / "e.jsonl")
    assert event["error"] == "KeyError: 'answer'"


def test_nested_spans_nest_in_time_even_if_the_wall_clock_jumps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = EventWriter(tmp_path / "e.jsonl", rank=0)
    with writer.span("outer", step=0, phase="LEARN", lane="trainer"):
        monkeypatch.setattr("time.time", lambda: 0.0)
        with writer.span("inner", step=0, phase="LEARN", lane="trainer"):
            writer.point("mark", step=0, phase="LEARN", lane="trainer")
    mark, inner, outer = read_events(tmp_path / "e.jsonl")
    assert outer["t0"] <= inner["t0"] <= mark["t0"] == mark["t1"] <= inner["t1"] <= outer["t1"]


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "e.jsonl", rank=0)

    def work(lane: str) -> None:
        for step in range(200):
            writer.point("tick", step=step, phase="LEARN", lane=lane)

    threads = [threading.Thread(target=work, args=(f"lane{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = read_events(tmp_path / "e.jsonl")
    assert len(events) == 800
    for number in range(4):
        assert [e["step"] for e in events if e["lane"] == f"lane{number}"] == list(range(200))


def test_torn_line_costs_itself_only_also_when_a_resumed_run_appends(tmp_path: Path) -> None:
    path = tmp_path / "e.jsonl"
    _write_point(path, "first")
    with path.open("a") as stream:
        stream.write('{"name": "torn", "t0": 1.')
    assert [event["name"] for event in read_events(path)] == ["first"]
    _write_point(path, "second")
    assert [event["name"] for event in read_events(path)] == ["first", "second"]


def test_after_close_nothing_is_written_and_nothing_breaks(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "e.jsonl", rank=0)
    writer.close()
    writer.close()
    writer.point("late", step=0, phase="LEARN", lane="host")
    assert read_events(tmp_path / "e.jsonl") == []


def test_missing_file_has_no_events(tmp_path: Path) -> None:
    assert read_events(tmp_path / "none.jsonl") == []


def _write_point(path: Path, name: str) -> None:
    writer = EventWriter(path, rank=0)
    writer.point(name, step=0, phase="LEARN", lane="host")
    writer.close()
