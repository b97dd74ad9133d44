"""Small pictures of media, as text that an HTML page can hold."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import DataError
from rollplex_cli.data.video import read_video

if TYPE_CHECKING:
    from PIL.Image import Image

NUM_FRAMES = 8
HEIGHT = 96
"""Pixels."""
VIDEO_SUFFIXES = (".mp4", ".mkv", ".webm", ".avi", ".mov", ".m4v", ".mpg", ".mpeg", ".flv")


def thumbnails(path: Path) -> list[str]:
    """Up to `NUM_FRAMES` evenly spread frames of a video, or the one picture of an image, as `data:` addresses.

    Raises:
        DataError: the file is missing or cannot be decoded.
    """
    if path.suffix.lower() in VIDEO_SUFFIXES:
        return [_encoded(frame) for frame in _frames(path)]
    try:
        return [_encoded(_picture(path))]
    except DataError:
        # Media taken out of rows have no suffix.
        return [_encoded(frame) for frame in _frames(path)]


def _frames(path: Path) -> list[Image]:
    from PIL import Image

    # Frames are chosen by number: any rate that asks for more than the limit gives the limit, evenly spread.
    clip = read_video(path, fps=1000.0, max_frames=NUM_FRAMES)
    return [Image.fromarray(frame) for frame in clip.frames]


def _picture(path: Path) -> Image:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"image cannot be decoded ({error}): {path}") from None


def _encoded(image: Image) -> str:
    image.thumbnail((HEIGHT * 4, HEIGHT))
    data = io.BytesIO()
    image.save(data, format="JPEG", quality=80)
    return "data:image/jpeg;base64," + base64.b64encode(data.getvalue()).decode("ascii")
