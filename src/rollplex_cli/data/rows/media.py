"""Media as rows name them: paths, bytes in a column, URLs; in the end always a file."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rollplex_cli.core.errors import DataError
from rollplex_cli.data.types import MediaRef

if TYPE_CHECKING:
    from collections.abc import Mapping

Kind = Literal["video", "image"]

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_DOWNLOAD_TIMEOUT_S = 60.0
MAX_DOWNLOAD_BYTES = 1 << 30


class MediaFiles:
    """Turns what rows say about media into references to files.

    Args:
        root: where relative paths start.
        folder: where bytes and downloads are written, under names made of their content or address.
        allow_remote: whether `http` and `https` addresses are fetched; any other scheme never is.
    """

    def __init__(self, root: Path, folder: Path, *, allow_remote: bool = False) -> None:
        self._root, self._folder, self._allow_remote = root, folder, allow_remote

    def reference(self, value: Any, kind: Kind) -> MediaRef:
        """The file that `value` stands for: a path, an address, bytes, or a mapping with `path`, `bytes`, `url`,
        `video` or `image`.

        Raises:
            DataError: something else, or an address that may not be fetched or does not answer.
        """
        if isinstance(value, str) and value:
            return MediaRef(kind=kind, path=self._file(value))
        if isinstance(value, bytes) and value:
            return MediaRef(kind=kind, path=self._write(value))
        if isinstance(value, dict):
            return self._mapping(value, kind)
        if isinstance(value, list):
            raise DataError("a medium given as a list of frames cannot be read: write it as one file")
        raise DataError(f"not a medium: {str(value)[:60]!r}")

    def _mapping(self, value: Mapping[str, Any], kind: Kind) -> MediaRef:
        if value.get("bytes"):
            return self.reference(value["bytes"], kind)
        for key in ("path", "url", kind):
            if value.get(key):
                return self.reference(value[key], kind)
        raise DataError(f"a medium names no file, its keys are: {', '.join(map(str, value))}")

    def _file(self, text: str) -> Path:
        if text.startswith("data:"):
            return self._inline(text)
        if text.startswith("file://"):
            return Path(text.removeprefix("file://"))
        if _URL.match(text):
            return self._download(text)
        return self._root / text

    def _inline(self, address: str) -> Path:
        head, _, body = address.partition(",")
        try:
            content = base64.b64decode(body, validate=True) if head.endswith(";base64") else b""
        except binascii.Error:
            content = b""
        if not content:
            raise DataError(f"a `data:` address holds no base64: {address[:60]!r}")
        return self._write(content)

    def _write(self, content: bytes) -> Path:
        path = self._folder / hashlib.sha256(content).hexdigest()[:32]
        if not path.exists():
            self._folder.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            part.write_bytes(content)
            part.rename(path)
        return path

    def _download(self, address: str) -> Path:
        if not self._allow_remote:
            raise DataError(
                f"media on other machines are not read: {address}",
                hint="set `task.options.allow_remote_media` to true if you trust the rows, or download the files",
            )
        if not address.lower().startswith(("http://", "https://")):
            raise DataError(f"media are fetched by http and https only: {address}")
        path = self._folder / f"url-{hashlib.sha256(address.encode()).hexdigest()[:32]}"
        if path.exists():
            return path
        try:
            with urllib.request.urlopen(address, timeout=_DOWNLOAD_TIMEOUT_S) as answer:
                content = answer.read(MAX_DOWNLOAD_BYTES + 1)
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise DataError(f"medium cannot be fetched ({error}): {address}") from None
        if len(content) > MAX_DOWNLOAD_BYTES:
            raise DataError(f"medium is larger than 1 GiB: {address}")
        self._folder.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(content)
        part.rename(path)
        return path
