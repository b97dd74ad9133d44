"""report.html: figures, pictures and samples of a run in one file without a script.

Everything a model or a data set wrote is escaped, and the page's own policy allows neither scripts nor anything from
elsewhere: what slipped through could still not run.
"""

from __future__ import annotations

import base64
import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import DataError
from rollplex_cli.core.files import read_tail, write_atomic
from rollplex_cli.report.page.frames import thumbnails
from rollplex_cli.report.series import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rollplex_cli.report.series import RunData

NUM_SAMPLES = 12
NUM_RESPONSES = 4
NUM_MEDIA = 4
TAIL_BYTES = 1 << 22
"""Enough of the end of a file of responses for its last step."""

_STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1100px; padding: 0 1em; color: #222; }
table { border-collapse: collapse; margin: .5em 0; }
td, th { padding: .2em .7em; text-align: left; vertical-align: top; }
tr:nth-child(even) { background: #f5f5f5; } pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
.sample { border-top: 1px solid #ccc; padding: 1em 0; } .frames img { margin-right: 3px; height: 96px; }
.note { color: #777; } img.figure { max-width: 100%; }
"""


def write_page(data: RunData, report: Mapping[str, Any], pictures: Sequence[Path]) -> Path:
    """Write `report/report.html` of a run; returns its path.

    Args:
        report: what `report.run.describe` says.
        pictures: figures to put in, as files; one that is missing is left out.
    """
    title = escape(printable(str(report["profile"])))
    body = [f"<h1>{title}</h1>", _facts(report)]
    body += [f'<p><img class="figure" alt="{escape(p.stem)}" src="{_picture(p)}"></p>' for p in pictures if p.is_file()]
    body += ["<h2>Samples</h2>", *_samples(latest_rows(data))]
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    text = (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{title}</title><style>{_STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )
    path = data.folder.report_dir / "report.html"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, text)
    return path


def latest_rows(data: RunData) -> list[dict[str, Any]]:
    """Responses of the last step that was dumped, of all ranks."""
    rows: list[dict[str, Any]] = []
    for file in sorted(data.folder.rollouts_dir.glob("*.jsonl")):
        for line in read_tail(file, num_lines=4096, max_bytes=TAIL_BYTES):
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and "response" in row:
                rows.append(row)
    last = max((_step(row) for row in rows), default=0)
    return [row for row in rows if _step(row) == last]


def _step(row: Mapping[str, Any]) -> int:
    step = row.get("step")
    return step if isinstance(step, int) else 0


def _facts(report: Mapping[str, Any]) -> str:
    names = ("num_steps", "train_s", "reward_first_step", "reward_window_mean", "target", "target_reached")
    cells = "".join(
        f"<tr><th>{name.replace('_', ' ')}</th><td>{_shown(report[name])}</td></tr>"
        for name in names
        if report.get(name) is not None
    )
    return f"<table>{cells}</table>"


def _samples(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    by_sample: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_sample.setdefault(str(row.get("sample_id", row.get("question"))), []).append(row)
    if not by_sample:
        return ['<p class="note">no responses were kept</p>']
    return [_sample(name, group) for name, group in list(by_sample.items())[:NUM_SAMPLES]]


def _sample(name: str, group: Sequence[Mapping[str, Any]]) -> str:
    first = group[0]
    # The best and the worst say more than the first few.
    ranked = sorted(group, key=lambda row: -_reward(row))
    half = NUM_RESPONSES // 2
    shown = ranked if len(ranked) <= NUM_RESPONSES else [*ranked[:half], *ranked[-half:]]
    lines = "".join(
        f"<tr><td>{_reward(row):.3f}</td><td>{_parts(row)}</td><td>{_shown(row.get('tokens'))}</td>"
        f"<td>{_shown(row.get('finish'))}</td><td><pre>{_text(row.get('response'))}</pre></td></tr>"
        for row in shown
    )
    return (
        f'<div class="sample"><h3>{_text(name)} <span class="note">step {_step(first)}</span></h3>'
        f"{_media(first.get('media'))}<pre>{_text(first.get('question'))}</pre>"
        f"<p>true answer: <b>{_text(first.get('answer'))}</b></p>"
        f"<table><tr><th>reward</th><th>parts</th><th>tokens</th><th>end</th><th>response</th></tr>{lines}</table></div>"
    )


def _media(paths: object) -> str:
    html = []
    for path in (paths if isinstance(paths, list) else [])[:NUM_MEDIA]:
        try:
            pictures = thumbnails(Path(str(path)))
        except DataError as error:
            html.append(f'<p class="note">{_text(error.message)}</p>')
            continue
        images = "".join(f'<img alt="frame" src="{picture}">' for picture in pictures)
        html.append(f'<div class="frames">{images}</div><p class="note">{_text(path)}</p>')
    return "".join(html)


def _parts(row: Mapping[str, Any]) -> str:
    parts = row.get("parts")
    pairs = parts.items() if isinstance(parts, dict) else ()
    return "<br>".join(f"{_text(name)} {_shown(value)}" for name, value in pairs)


def _reward(row: Mapping[str, Any]) -> float:
    value = row.get("reward")
    return float(value) if isinstance(value, int | float) else 0.0


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else _text(value)


def _text(value: object) -> str:
    """Any text as HTML text; line ends stay, other control characters become escapes."""
    return "\n".join(escape(printable(line)) for line in str("" if value is None else value).split("\n"))


def _picture(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")
