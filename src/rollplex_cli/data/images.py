"""Reading image files as they are meant to be seen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rollplex_cli.core.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_WIDE = ("I", "I;16", "I;16B", "I;16L", "I;16N")
"""Grey values of 16 bits and more; PIL's own conversion would make everything above 255 white."""


def check_file(path: Path, what: str) -> None:
    """Raises DataError where `path` is no readable file: missing, a folder, a loop of links, a name that no file
    can have, or behind a folder that may not be entered."""
    try:
        found = path.is_file()
    except (OSError, ValueError) as error:
        shown = str(path) if len(str(path)) < 300 else f"{str(path)[:300]}..."
        raise DataError(f"{what} cannot be opened ({getattr(error, 'strerror', None) or error}): {shown}") from None
    if not found:
        raise DataError(f"no such {what}: {path}")


def read_image(path: Path) -> NDArray[Any]:
    """[height, width, 3] uint8 RGB, upright, on white where it is transparent; of several pictures the first.

    Raises:
        DataError: no such file, one that does not decode, or pixels without a known range.
    """
    import numpy as np
    from PIL import Image, ImageOps

    check_file(path, "image")
    try:
        with Image.open(path) as image:
            upright = ImageOps.exif_transpose(image)
            if upright.mode in ("RGBA", "LA", "PA") or "transparency" in upright.info:
                # Without a background, what is transparent shows whatever colour lies beneath.
                upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright.convert("RGBA"))
            if upright.mode in _WIDE:
                upright = _narrow(np.asarray(upright))
            if upright.mode == "F":
                raise ValueError("floating-point pixels, whose range is not known")
            return np.asarray(upright.convert("RGB"))
    except Exception as error:  # decoders raise anything on damaged bytes
        raise DataError(f"image cannot be decoded ({error}): {path}") from None


def _narrow(values: NDArray[Any]) -> Any:
    """Grey values of up to 16 bits as an image of 8."""
    from PIL import Image

    if values.min() < 0 or values.max() > 0xFFFF:
        raise ValueError(f"grey values from {values.min()} to {values.max()}")
    return Image.fromarray((values >> 8).astype("uint8"))
