"""Rows of public data sets, in every kind of file, as samples."""

from __future__ import annotations

import base64
import json
import math
import os
import threading
from decimal import Decimal
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


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


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
        ({"question": "?", "answer": "x", "image": "data:image/png;base64,?"}, "holds no base64"),
        # What used to be trained on as if it were text, or without its medium.
        ({"question": "?", "answer": ["x", "y"]}, r"`answer` is \"\['x', 'y'\]\""),
        ({"question": "?", "answer": True}, "`answer` is 'True'"),
        ({"question": "?", "answer": math.nan}, "no answer in it"),
        ({"question": "?", "answer": Decimal("sNaN")}, "`answer` is 'sNaN'"),
        ({"question": "?", "answer": math.inf}, "`answer` is 'inf'"),
        ({"question": "?", "answer": " \n"}, "answer is empty"),
        ({"question": "?", "answer": "1 + 1\n####"}, "answer is empty"),
        ({"question": [["?"]], "answer": "x"}, "`question` is"),
        ({"question": " ", "answer": "x"}, "question is empty"),
        ({"question": "\ud800", "answer": "x"}, "lone surrogate"),
        ({"question": "?", "answer": "\udfff"}, "lone surrogate"),
        ({"question": "?", "answer": "x", "options": [["A", "a cat"]]}, "an option is neither"),
        ({"question": "?", "answer": "x", "path": "a.mp4"}, "no `data_type` says which kind"),
        (
            {"question": "?", "answer": "x", "path": "a.mp4", "data_type": "audio"},
            "none of video, image, text: 'audio'",
        ),
        ({"prompt": '[{"role": "user", "content": "?"}]', "answer": "x"}, "written as text"),
        ({"question": "?", "reward_model": {"ground_truth": ["x"]}}, "neither a text nor a number"),
        ({"prompt": user({"type": "image"}), "answer": "x"}, r"a place for a file \(image\)"),
        ({"prompt": user({"type": "audio", "audio": "a.wav"}), "answer": "x"}, "neither text nor a medium"),
        ({"prompt": user({"type": "image", "image": "a.png"}), "images": ["b.png"], "answer": "x"}, "some elsewhere"),
        ({"prompt": user({"type": "image", "image": "a.png"}, {"type": "image"}), "answer": "x"}, "some elsewhere"),
    ],
)
def test_faults_name_the_row(row: dict[str, Any], message: str, media: MediaFiles) -> None:
    with pytest.raises(DataError, match=rf"row `x:9`: .*{message}"):
        to_sample(row, "x:9", media, PLAIN)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [(5.0, "5"), (-0.5, "-0.5"), (1e300, "1e+300"), (Decimal("1.50"), "1.50"), (10**400, "1" + "0" * 400),
     ("\u0661\u0662", "\u0661\u0662"), ("#### A heading\nand text", "#### A heading\nand text"), ("a #### 7 ", "7")],
)  # fmt: skip
def test_answers_as_tables_hold_them(answer: Any, expected: str, media: MediaFiles) -> None:
    assert to_sample({"question": "?", "answer": answer}, "x:1", media, PLAIN).answer == expected


@pytest.mark.parametrize(
    "options", [{"A": "a cat", "B": "a dog", "C": None}, "A. a cat\nB. a dog", ["A. a cat", "B. a dog"]]
)
def test_options_however_written(options: Any, media: MediaFiles) -> None:
    sample = to_sample({"question": "?", "answer": "B", "options": options}, "x:1", media, PLAIN)
    assert sample.question == "?\nOptions:\nA. a cat\nB. a dog"
    assert sample.extra["options"] == ["A. a cat", "B. a dog"]


def test_media_inside_messages(media: MediaFiles) -> None:
    parts = [
        {"type": "image", "image": "a.png", "text": None}, {"type": "text", "text": " or ", "image": None},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(b'pixels').decode()}"}},
        {"type": "video", "path": "c.mp4"}, "?",
    ]  # fmt: skip
    sample = to_sample({"prompt": user(*parts), "answer": "x"}, "x:1", media, PLAIN)
    kinds = [part if isinstance(part, str) else part.kind for part in sample.messages[0].content]
    assert kinds == ["image", " or ", "image", "video", "?"]
    assert [m.path.name for m in sample.media][::2] == ["a.png", "c.mp4"]
    assert sample.media[1].path.read_bytes() == b"pixels"


@pytest.mark.parametrize("nothing", [None, "", math.nan, {"bytes": None, "path": None}, [None], []])
def test_cells_that_hold_no_medium(nothing: Any, media: MediaFiles) -> None:
    row = {"question": "?", "answer": "x", "images": nothing, "video": nothing}
    assert to_sample(row, "x:1", media, PLAIN).media == ()
    typed = {"question": "?", "answer": "x", "path": "a.MP4", "data_type": "Video"}
    assert to_sample(typed, "x:1", media, PLAIN).media[0].kind == "video"


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
    for folder, (name, content_) in {
        "splits": ("dataset_dict.json", b'{"splits": null}'),
        "utf16": ("dataset_dict.json", b"\xff\xfe"),
        "names": ("state.json", b'{"_data_files": ["a.arrow"]}'),
        "none": ("state.json", b'{"_data_files": null}'),
        "nameless": ("state.json", b'{"_data_files": [{}]}'),
        "gone": ("state.json", b'{"_data_files": [{"filename": "a.arrow"}]}'),
        "folder": ("a.jsonl/x", b""),
    }.items():
        path = tmp_path / "saved" / folder / name
        path.parent.mkdir(parents=True)
        path.write_bytes(content_)
        with pytest.raises(DataError, match=r"damaged|cannot be read|rows are read from"):
            list(read_rows(tmp_path / "saved" / folder))
    with pytest.raises(DataError, match="several kinds"):
        list(read_rows(tmp_path))


def test_columns_that_python_cannot_hold(tmp_path: Path) -> None:
    text = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0"), pa.py_buffer(b"\xff")])
    for values in (text, pa.array([2**62], pa.timestamp("us")), pa.array([1], pa.timestamp("ns"))):
        pyarrow.parquet.write_table(pa.table({"a": values}), tmp_path / "a.parquet")
        with pytest.raises(DataError, match=r"cannot be read.*a\.parquet"):
            list(read_rows(tmp_path / "a.parquet"))
    pyarrow.parquet.write_table(pa.table({"a": pa.nulls(1), "b": pa.array([1])}), tmp_path / "a.parquet")
    assert [row for _, row in read_rows(tmp_path / "a.parquet")] == [{"a": None, "b": 1}]


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


def test_paths_that_lead_nowhere(rows_task: Task, tmp_path: Path) -> None:
    os.symlink(tmp_path / "b", tmp_path / "a")
    os.symlink(tmp_path / "a", tmp_path / "b")
    for path in (str(tmp_path / "a"), "~no-such-user/x", "a\0b", "a" * 5000):
        with pytest.raises(UsageError, match="task `rows`: no path"):
            rows_task.prepare(tmp_path / "data", {"path": path}, 0)
