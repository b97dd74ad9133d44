"""The HTML page: samples with their frames, and text that stays text."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rollplex_cli.core.paths import RunFolder
from rollplex_cli.data.video import write_video
from rollplex_cli.report.page.frames import thumbnails
from rollplex_cli.report.page.page import latest_rows, write_page
from rollplex_cli.report.series import load_run

REPORT = {"profile": "<b>tiny</b>", "num_steps": 3, "train_s": 1.5, "target": None, "reward_first_step": 0.25}
EVIL = '</pre><script>alert(1)</script><img src="http://x.example/a.png" onerror="x()">\x1b[31m\u202e'


class Page(HTMLParser):
    """Tags and text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def images(self) -> list[str]:
        return [str(attrs["src"]) for tag, attrs in self.tags if tag == "img"]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.make()
    folder.profile.write_text("name: tiny\n", encoding="utf-8")
    clip, picture = tmp_path / "clip.mp4", tmp_path / "picture"
    write_video(clip, np.arange(24, dtype=np.uint8).repeat(32 * 48 * 3).reshape(24, 32, 48, 3), 4)
    Image.new("RGB", (300, 40), "red").save(picture, format="PNG")
    rows = [
        {"step": step, "sample_id": "s1", "question": f"Where?\n{EVIL}", "answer": "left", "response": text,
         "reward": reward, "parts": {"exact": reward, "<i>": 0.0}, "tokens": 6, "finish": "stop",
         "media": [str(clip), str(picture), str(tmp_path / "gone.mp4")]}
        for step in (1, 2)
        for reward, text in ((0.0, EVIL), (1.0, "<answer>left</answer>"))
    ]  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder.rollouts_dir / "rank0.jsonl").write_text(text + '{"step": 2, "resp', encoding="utf-8")
    return folder


def test_samples_of_the_last_step_with_frames(run: RunFolder) -> None:
    data = load_run(run.root)
    assert [row["step"] for row in latest_rows(data)] == [2, 2]
    path = write_page(data, REPORT, [])
    page = Page(path.read_text(encoding="utf-8"))
    images = page.images()
    assert len(images) == 8 + 1
    assert all(image.startswith("data:image/jpeg;base64,") for image in images)
    assert "no such video" in page.text
    assert "<answer>left</answer>" in page.text
    assert page.text.index("<answer>left</answer>") < page.text.index("alert(1)", page.text.index("response"))


def test_nothing_of_models_and_data_becomes_markup(run: RunFolder) -> None:
    html = write_page(load_run(run.root), REPORT, []).read_text(encoding="utf-8")
    page = Page(html)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "iframe", "b>", "i"}
    assert "<b>tiny</b>" in page.text
    assert not any("onerror" in attrs for _, attrs in page.tags)
    assert "default-src 'none'" in html
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert EVIL.split("\x1b")[0] in page.text


def test_a_run_without_responses(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.make()
    folder.profile.write_text("name: tiny\n", encoding="utf-8")
    assert "no responses were kept" in write_page(load_run(tmp_path), REPORT, []).read_text(encoding="utf-8")


def test_thumbnails_are_small(run: RunFolder, tmp_path: Path) -> None:
    import base64
    import io

    sizes = [
        Image.open(io.BytesIO(base64.b64decode(t.partition(",")[2]))).size for t in thumbnails(tmp_path / "picture")
    ]
    assert sizes == [(300, 40)]
