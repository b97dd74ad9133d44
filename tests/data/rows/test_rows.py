"""Rows of public data sets, in every kind of file, as samples."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from rollplex_cli.core.errors import DataError, UsageError
from rollplex_cli.data.rows.convert import TextOptions, to_sample
from rollplex_cli.data.rows.media import MediaFiles
from rollplex_cli.data.rows.read import read_rows
from rollplex_cli.data.tasks import Task, load_task
from rollplex_cli.data.types import MediaRef, Sample

PLAIN = TextOptions()
VIDEO_R1 = {
    "problem_id": 7,
    "problem": "Which animal?",
    "data_type": "video",
    "problem_type": "multiple choice",
    "options": ["A. a cat", "B. a dog"],
    "process": "",
    "solution": "<answer>B</answer>",
    "path": "./clips/a.mp4",
    "data_source": "test",
}
VERL = {
    "data_source": "geo",
    "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "<image> and <image>: same?"}],
    "images": [{"bytes": None, "path": "a.png"}, {"bytes": None, "path": "b.png"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "yes"},
    "extra_info": {"index": 3, "split": "train"},
}
GSM8K = {"question": "How many are 1000 + 234?", "answer": "1000 + 234 = <<1000+234=1234>>1,234\n#### 1,234"}


@pytest.fixture
def media(tmp_path: Path) -> MediaFiles:
    return MediaFiles(tmp_path / "root", tmp_path / "media")


@pytest.fixture(scope="module")
def rows_task() -> Task:
    return load_task("rows")


def content(sample: Sample) -> list[list[str]]:
    return [[part if isinstance(part, str) else part.path.name for part in m.content] for m in sample.messages]


def test_video_r1(media: MediaFiles, tmp_path: Path) -> None:
    sample = to_sample(VIDEO_R1, "x:1", media, TextOptions(instruction="Use tags."))
    assert sample.media == (MediaRef(kind="video", path=tmp_path / "root" / "clips" / "a.mp4"),)
    assert (sample.answer, sample.kind) == ("B", "multiple choice")
    assert content(sample) == [["a.mp4", "Which animal?\nOptions:\nA. a cat\nB. a dog\nUse tags."]]
    assert sample.extra["options"] == VIDEO_R1["options"]
    several = to_sample(VIDEO_R1 | {"path": ["a.mp4", "b.mp4"]}, "x:1", media, PLAIN)
    assert [m.path.name for m in several.media] == ["a.mp4", "b.mp4"]


def test_verl_keeps_the_places_of_media(media: MediaFiles) -> None:
    sample = to_sample(VERL, "x:1", media, TextOptions(system="not used: the row has its own"))
    assert [m.role for m in sample.messages] == ["system", "user"]
    assert content(sample) == [["Be brief."], ["a.png", " and ", "b.png", ": same?"]]
    assert (sample.answer, sample.kind) == ("yes", "math")
    assert sample.extra["extra_info"] == {"index": 3, "split": "train"}


def test_text_only(media: MediaFiles) -> None:
    sample = to_sample(GSM8K, "x:1", media, TextOptions(system="Think."))
    assert (sample.answer, sample.kind, sample.media) == ("1,234", "numerical", ())
    assert content(sample) == [["Think."], [GSM8K["question"]]]
    literal = to_sample({"question": "What does <image> mean in HTML?", "answer": "x"}, "x:1", media, PLAIN)
    assert content(literal) == [["What does <image> mean in HTML?"]]


def test_media_without_placeholders_come_first(media: MediaFiles) -> None:
    row = {"question": "?", "answer": 5, "images": ["a.png"], "video": "b.mp4"}
    assert content(to_sample(row, "x:1", media, PLAIN)) == [["b.mp4", "a.png", "?"]]
    parts = [{"type": "text", "text": "see "}, {"type": "image"}, {"type": "text", "text": "!"}]
    row = {"prompt": [{"role": "user", "content": parts}], "images": ["a.png"], "answer": "x"}
    assert content(to_sample(row, "x:1", media, PLAIN)) == [["see ", "a.png", "!"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "x"}, "no question in it"),
        ({"question": "x"}, "no answer in it"),
        (VERL | {"images": [{"path": "a.png"}]}, r"1 image files do not fit 2 placeholders `<image>`"),
        (VERL | {"prompt": []}, "does not end with a turn of the user"),
        (VERL | {"prompt": [{"role": "assistant", "content": "x"}]}, "does not end with a turn of the user"),
        (VERL | {"prompt": [{"role": "tool", "content": "x"}]}, "no role"),
        (VERL | {"prompt": [{"role": "user", "content": None}]}, "no text"),
        ({"question": "?", "answer": "x", "image": 3}, "not a medium: '3'"),
        ({"question": "?", "answer": "x", "image": {"width": 3}}, "names no file, its keys are: width"),
        ({"question": "?", "answer": "x", "videos": [["a.jpg", "b.jpg"]]}, "list of frames"),
        ({"question": "?", "answer": "x", "image": "https://example.com/a.png"}, "not read: https://example.com/a.png"),
        ({"question": "?", "answer": "x", "video": "s3://bucket/a.mp4"}, "not read: s3://"),
    ],
)
def test_faults_name_the_row(row: dict[str, Any], message: str, media: MediaFiles) -> None:
    with pytest.raises(DataError, match=rf"row `x:9`: .*{message}"):
        to_sample(row, "x:9", media, PLAIN)


def test_bytes_become_files_once(media: MediaFiles, tmp_path: Path) -> None:
    row = {"question": "?", "answer": "x", "images": [{"bytes": b"pixels", "path": "gone.png"}, {"bytes": b"pixels"}]}
    first, second = to_sample(row, "x:1", media, PLAIN).media
    assert first == second
    assert first.path.read_bytes() == b"pixels"
    assert [path.parent for path in (tmp_path / "media").iterdir()] == [tmp_path / "media"]


def test_addresses_are_fetched_where_allowed(tmp_path: Path) -> None:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200 if self.path == "/a.png" else 404)
            self.end_headers()
            self.wfile.write(b"pixels")

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        files = MediaFiles(tmp_path, tmp_path / "media", allow_remote=True)
        base = f"http://127.0.0.1:{server.server_port}"
        for _ in range(2):
            assert files.reference(f"{base}/a.png", "image").path.read_bytes() == b"pixels"
        assert asked == ["/a.png"]
        with pytest.raises(DataError, match="cannot be fetched"):
            files.reference(f"{base}/b.png", "image")
        with pytest.raises(DataError, match="http and https only"):
            files.reference("ftp://127.0.0.1/a.png", "image")
    finally:
        server.shutdown()


def hf_folder(path: Path, rows: list[dict[str, Any]]) -> None:
    """What `datasets.Dataset.save_to_disk` writes, in two shards."""
    path.mkdir(parents=True)
    names = []
    for index, part in enumerate((rows[:1], rows[1:])):
        names.append(f"data-{index:05d}-of-00002.arrow")
        table = pa.Table.from_pylist(part)
        with pa.OSFile(str(path / names[-1]), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names], "_split": "train", "_indices_data_files": None}
    (path / "state.json").write_text(json.dumps(state), encoding="utf-8")
    (path / "dataset_info.json").write_text("{}", encoding="utf-8")


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    rows = [
        {"question": f"q{i}\u2028x", "answer": str(i), "images": [{"bytes": b"\x00\xff", "path": None}]}
        for i in range(3)
    ]
    plain = [{**row, "images": None} for row in rows]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in plain)
    (tmp_path / "a.jsonl").write_text(lines + "\n", encoding="utf-8")
    (tmp_path / "b.json").write_text(json.dumps(plain), encoding="utf-8")
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    hf_folder(tmp_path / "d", rows)
    hf_folder(tmp_path / "e" / "test", rows)
    (tmp_path / "e" / "dataset_dict.json").write_text('{"splits": ["test"]}', encoding="utf-8")
    (tmp_path / "f").mkdir()
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows[1:]), tmp_path / "f" / "1.parquet")
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows[:1]), tmp_path / "f" / "0.parquet")
    for name, expected in {"a.jsonl": plain, "b.json": plain, "c.parquet": rows, "d": rows, "f": rows}.items():
        assert [row for _, row in read_rows(tmp_path / name)] == expected, name
    assert [name for name, _ in read_rows(tmp_path / "a.jsonl")] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]
    assert [row for _, row in read_rows(tmp_path / "e", "test")] == rows
    with pytest.raises(DataError, match="no split `train`, only test"):
        list(read_rows(tmp_path / "e"))


def test_files_that_are_no_rows(tmp_path: Path) -> None:
    cases = {
        "torn.jsonl": (b'{"a": 1}\n{"a": ', r"not valid JSON.*torn\.jsonl:2"),
        "list.jsonl": (b"[1]\n", "not a mapping"),
        "latin.jsonl": (b'{"a": "\xff"}\n', "cannot be read"),
        "a.parquet": (b"PAR1 no", "cannot be read"),
        "a.arrow": (b"", "cannot be read"),
        "a.csv": (b"a,b\n", "rows are read from"),
    }
    for name, (content_, message) in cases.items():
        (tmp_path / name).write_bytes(content_)
        with pytest.raises(DataError, match=message):
            list(read_rows(tmp_path / name))
    with pytest.raises(DataError, match="no such data set"):
        list(read_rows(tmp_path / "none"))
    with pytest.raises(DataError, match="several kinds"):
        list(read_rows(tmp_path))


def test_the_task_prepares_once(rows_task: Task, tmp_path: Path) -> None:
    Image.new("RGB", (56, 56)).save(tmp_path / "a.png")
    rows = [GSM8K, {"question": "colour of <image>?", "answer": "black", "image": "a.png"}, GSM8K]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    options = {"path": str(source), "num_heldout": 1}
    rows_task.prepare(tmp_path / "data", options, 0)
    train = rows_task.samples(tmp_path / "data", "train")
    assert [s.sample_id for s in train] == ["rows.jsonl:1", "rows.jsonl:2"]
    assert train[1].media == (MediaRef(kind="image", path=tmp_path / "a.png"),)
    assert content(train[1]) == [["colour of ", "a.png", "?\nGive the final answer between <answer> and </answer>."]]
    assert [s.sample_id for s in rows_task.samples(tmp_path / "data", "heldout")] == ["rows.jsonl:3"]
    source.unlink()
    rows_task.prepare(tmp_path / "data", options, 0)
    assert rows_task.samples(tmp_path / "data", "train") == train


@pytest.mark.parametrize(
    ("options", "message"),
    [({}, "needs a data set"), ({"paths": "x"}, "no option: paths"), ({"path": 3}, "must be of type str"),
     ({"path": "x", "max_rows": -1}, "must not be negative")],
)  # fmt: skip
def test_options_of_the_task(rows_task: Task, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        rows_task.prepare(tmp_path, options, 0)
