from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollplex_cli.core.files import read_jsonl, read_tail, write_atomic
from rollplex_cli.core.paths import RunFolder


def test_atomic_write_leaves_the_old_text_if_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_atomic(path, "old")

    def fail(*_arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, "new")
    assert path.read_text() == "old"


def test_rows_that_are_no_objects_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_bytes(b'{"step": 1}\n[1]\n\xff\xfe\n3\n\n{"step": 2}\n{"st')
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1}, {"step": 2}]


def test_line_separators_inside_text_do_not_split_a_row(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_text('{"text": "a\u2028b\x0b"}\n', encoding="utf-8")
    rows = read_jsonl(tmp_path / "m.jsonl")
    # A raw control character is no JSON, a line separator is.
    assert rows in ([{"text": "a\u2028b\x0b"}], [])
    (tmp_path / "m.jsonl").write_text('{"text": "a\u2028b"}\n', encoding="utf-8")
    assert read_jsonl(tmp_path / "m.jsonl") == [{"text": "a\u2028b"}]


def test_tail_reads_the_end_of_a_long_file(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("\n".join(f"line {n}" for n in range(100_000)) + "\n\n")
    assert read_tail(tmp_path / "log", 2) == ["line 99998", "line 99999"]
    assert read_tail(tmp_path / "none") == []


def test_run_folder_paths_are_distinct_and_inside(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    names = [name for name in vars(RunFolder) if isinstance(vars(RunFolder)[name], property)]
    paths = [getattr(run, name) for name in names] + [run.events(0), run.status(0), run.rank_log(0), run.events(1)]
    assert len(set(paths)) == len(paths) > 15
    assert all(path.is_relative_to(run.root) for path in paths)


def test_redirected_output_holds_what_subprocesses_and_c_code_print(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank0.log"
    program = (
        "import os, sys; from pathlib import Path; from rollplex_cli.core.log import redirect_output;"
        f"redirect_output(Path({str(log)!r})); print('python'); os.write(2, b'below\\n'); os.system('echo child')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert sorted(log.read_text().split()) == ["below", "child", "python"]
