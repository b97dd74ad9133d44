from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.report.series import load_run
from rollplex_cli.report.spans import busy_s, common_s, pack, parse_spans, tasks_only, typical_steps, union
from rollplex_cli.report.tables import task_times
from rollplex_cli.report.trace import chrome_trace

MakeRun = Callable[..., RunFolder]

# Whole numbers, so that sums are exact.
INTERVALS = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)).map(lambda pair: (pair[0], pair[0] + pair[1])))


def covered(intervals: list[tuple[int, int]]) -> set[int]:
    return {second for start, end in intervals for second in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_busy_and_common_count_seconds(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> None:
    assert busy_s(first) == len(covered(first))
    assert common_s(first, second) == len(covered(first) & covered(second))


@given(INTERVALS)
def test_union_is_disjoint_and_ascending(intervals: list[tuple[int, int]]) -> None:
    merged = union(intervals)
    assert all(left[1] < right[0] for left, right in itertools.pairwise(merged))


@given(INTERVALS)
def test_no_two_intervals_of_a_track_overlap(intervals: list[tuple[int, int]]) -> None:
    tracks = pack(intervals)
    for track in set(tracks):
        members = [interval for interval, place in zip(intervals, tracks, strict=True) if place == track]
        assert busy_s(members) == sum(end - start for start, end in members)


def test_neighbours_share_a_track_despite_rounding() -> None:
    assert pack([(0.0, 1.000001), (1.0, 2.0)]) == [0, 0]


def test_typical_step_is_the_median_of_each_schedule(make_run: MakeRun) -> None:
    spans = parse_spans(load_run(make_run(both=True).root))
    steps = typical_steps(spans)
    assert set(steps) == {"colocate", "rollplex"}
    for name, members in steps.items():
        # Steps 1, 3, 5, 7 against 2, 4, 6, 8, the first and the last of each left out.
        assert {(span.schedule, span.step) for span in members} == {(name, {"rollplex": 3, "colocate": 4}[name])}


def test_decode_is_seen_where_another_rank_does_it(make_run: MakeRun) -> None:
    spans = parse_spans(load_run(make_run(num_steps=3).root))
    apart = [dataclasses.replace(span, rank=2 if span.name == "decode" else 0) for span in spans]
    again = [dataclasses.replace(span, rank=3) for span in apart if span.name == "decode"]
    [members] = typical_steps([*apart, *again]).values()
    assert {span.name for span in members if span.rank == 2} == {"decode"}
    assert {span.rank for span in members} == {0, 2}


def test_typical_step_of_nothing_is_nothing() -> None:
    assert typical_steps([]) == {}


def test_prefixes_are_seen_beside_the_decode(make_run: MakeRun) -> None:
    spans = parse_spans(load_run(make_run(both=True).root))
    beside = {
        schedule: {row.task: row.beside_decode for row in task_times([s for s in spans if s.schedule == schedule])}
        for schedule in ("colocate", "rollplex")
    }
    assert beside["rollplex"]["actor_prefix"] == pytest.approx(1.0)
    assert beside["colocate"]["actor_prefix"] == pytest.approx(0.0, abs=1e-5)
    assert beside["rollplex"]["decode"] is None


def test_events_of_another_shape_are_left_out(make_run: MakeRun) -> None:
    folder = make_run(num_steps=1)
    before = len(parse_spans(load_run(folder.root)))
    with folder.events(0).open("a", encoding="utf-8") as stream:
        stream.write(
            '{"name": "decode", "t0": "soon", "t1": 2, "step": 1}\n{"name": "decode", "t0": 5, "t1": 4, "step": 1}\n'
        )
        stream.write('{"name": "decode", "t0": 1, "t1"')
    assert len(parse_spans(load_run(folder.root))) == before


def test_trace_has_every_span_and_no_overlap_within_a_thread(make_run: MakeRun) -> None:
    spans = parse_spans(load_run(make_run().root))
    events = chrome_trace(spans)["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(spans)
    assert min(event["ts"] for event in complete) == 0
    assert {"decode[0]", "GENERATE", "update"} <= {event["name"] for event in complete}
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in complete:
        thread = threads.setdefault((event["pid"], event["tid"]), [])
        thread.append((event["ts"], event["ts"] + event["dur"]))
    for intervals in threads.values():
        intervals.sort()
        assert all(left[1] <= right[0] + 3 for left, right in itertools.pairwise(intervals))
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    assert set(threads) == named


def test_phases_are_no_tasks(make_run: MakeRun) -> None:
    spans = parse_spans(load_run(make_run().root))
    assert {"phase"} == {span.name for span in spans} - {span.name for span in tasks_only(spans)}
