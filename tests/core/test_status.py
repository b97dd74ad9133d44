from __future__ import annotations

from pathlib import Path

import pytest

from rollplex_cli.core import errors
from rollplex_cli.core.status import (
    PrepareStatus,
    RankStatus,
    error_of,
    failed_prepare,
    failed_rank,
    read_prepare_status,
    read_status,
    write_status,
)


def test_status_comes_back_as_written(tmp_path: Path) -> None:
    status = RankStatus(rank=1, state="running", step=4, phase="LEARN", waiting=["reward of group 3"], pid=17)
    write_status(tmp_path / "status" / "rank1.json", status)
    assert read_status(tmp_path / "status" / "rank1.json") == status


def test_preparation_comes_back_as_written(tmp_path: Path) -> None:
    status = PrepareStatus(stage="cold_start", step=60, total=250, loss=0.5, accuracy=0.25)
    write_status(tmp_path / "prepare.json", status)
    assert read_prepare_status(tmp_path / "prepare.json") == status


@pytest.mark.parametrize("text", ["", "{", "[]", '{"state": "running"}', '{"rank": 0, "state": "dancing"}'])
def test_unreadable_status_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "s.json").write_text(text)
    assert read_status(tmp_path / "s.json") is None
    assert read_prepare_status(tmp_path / "s.json") is None


def test_fields_of_a_newer_version_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text('{"rank": 0, "state": "done", "mood": "good"}')
    status = read_status(tmp_path / "s.json")
    assert status is not None
    assert status.state == "done"


ALL = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.RollplexError)
]  # fmt: skip


@pytest.mark.parametrize("kind", ALL)
def test_an_error_survives_the_way_through_a_status_file(tmp_path: Path, kind: type[errors.RollplexError]) -> None:
    write_status(tmp_path / "s.json", failed_rank(2, kind("it broke: `x`", hint="mend it")))
    status = read_status(tmp_path / "s.json")
    assert status is not None
    back = error_of(status)
    assert (type(back), back.message, back.hint, back.exit_code) == (kind, "it broke: `x`", "mend it", kind.exit_code)


def test_every_error_is_tested() -> None:
    assert len(ALL) == 18


def test_foreign_exceptions_fail_the_run_with_their_name() -> None:
    back = error_of(failed_prepare(ZeroDivisionError("division by zero")))
    assert type(back) is errors.RunFailedError
    assert back.message == "ZeroDivisionError: division by zero"
    assert back.exit_code == 1


def test_interruption_is_a_state_of_its_own() -> None:
    assert failed_rank(0, errors.InterruptedRunError("stopped")).state == "interrupted"
    assert failed_rank(0, KeyboardInterrupt()).exit_code == 75
    assert failed_rank(0, errors.StallError("slow")).state == "failed"


def test_a_rank_s_last_word_is_not_replaced_by_progress(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    running = RankStatus(rank=0, state="running", step=4)
    write_status(path, running)
    write_status(path, failed_rank(0, errors.TargetNotReachedError("0.61")))
    write_status(path, running)
    status = read_status(path)
    assert status is not None
    assert (status.state, status.exit_code) == ("failed", 5)
    write_status(path, failed_rank(0, errors.RunFailedError("while closing")))
    status = read_status(path)
    assert status is not None
    assert status.message == "while closing"
