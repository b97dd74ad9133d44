"""Image files of every kind that people have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rollplex_cli.core.errors import DataError
from rollplex_cli.data.images import read_image

GREY = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000


@pytest.mark.parametrize(
    ("name", "image", "options"),
    [
        ("a.webp", Image.new("RGB", (8, 6), (255, 0, 0)), {"lossless": True}),
        ("a.gif", Image.new("P", (8, 6), 0), {}),
        ("a.bmp", Image.new("RGB", (8, 6), (255, 0, 0)), {}),
        ("a.tiff", Image.new("CMYK", (8, 6), (0, 255, 255, 0)), {}),
        ("no suffix", Image.new("RGB", (8, 6), (255, 0, 0)), {"format": "PNG"}),
        ("a.jpg", Image.new("1", (8, 6), 1), {}),
        ("wrong.png", Image.new("RGB", (8, 6), (255, 0, 0)), {"format": "WEBP", "lossless": True}),
    ],
)
def test_formats(name: str, image: Image.Image, options: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / name
    if image.mode == "P":
        image.putpalette([255, 0, 0])
    image.save(path, **options)
    pixels = read_image(path)
    assert (pixels.shape, pixels.dtype) == ((6, 8, 3), np.uint8)
    assert (pixels == ([255, 255, 255] if image.mode == "1" else [255, 0, 0])).all()


def test_of_an_animation_the_first_picture_is_read(tmp_path: Path) -> None:
    for name in ("a.gif", "a.webp"):
        first, second = (Image.new("RGB", (8, 6), colour) for colour in ("red", "blue"))
        first.save(tmp_path / name, save_all=True, append_images=[second], duration=100, lossless=True)
        assert abs(read_image(tmp_path / name).astype(int) - [255, 0, 0]).max() <= 4


def test_grey_of_16_bits_keeps_its_range(tmp_path: Path) -> None:
    for name in ("a.png", "a.tiff"):
        Image.fromarray(GREY).save(tmp_path / name)
        assert np.array_equal(read_image(tmp_path / name), np.repeat((GREY >> 8)[..., None], 3, axis=2))


def test_pictures_stand_upright_on_white(tmp_path: Path) -> None:
    pixels = np.zeros((6, 8, 3), dtype=np.uint8)
    pixels[0] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    turned = read_image(tmp_path / "a.png")
    assert turned.shape == (8, 6, 3) and (turned[:, -1] == 255).all() and (turned[:, 0] == 0).all()
    Image.new("RGBA", (8, 6), (0, 0, 0, 0)).save(tmp_path / "b.png")
    assert (read_image(tmp_path / "b.png") == 255).all()


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    whole = tmp_path / "whole.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)).save(whole)
    content = whole.read_bytes()
    os.symlink(tmp_path / "b", tmp_path / "a")
    os.symlink(tmp_path / "a", tmp_path / "b")
    os.mkfifo(tmp_path / "pipe")
    Image.fromarray(np.ones((4, 4), dtype=np.float32)).save(tmp_path / "float.tiff")
    Image.fromarray(np.full((4, 4), -5, dtype=np.int32)).save(tmp_path / "negative.tiff")
    files = {
        "cut.jpg": content[: len(content) // 2],
        "photo.heic": b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(100),
        "text.png": b"no picture",
        "empty.png": b"",
        "header.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(17),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    cannot = [*files, "float.tiff", "negative.tiff"]
    for name in (*cannot, "a", "pipe", ".", "none.png", "a\0b", "x" * 300):
        expected = "cannot be decoded" if name in cannot else "no such image|cannot be opened"
        with pytest.raises(DataError, match=expected):
            read_image(tmp_path / name)
