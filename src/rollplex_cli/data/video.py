"""Reading frames from video files at a sampled rate, and writing frames to a file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rollplex_cli.core.errors import DataError
from rollplex_cli.data.images import check_file

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

TEMPORAL_PATCH = 2
"""Frames per temporal patch of Qwen's models: the number of sampled frames is a multiple of it."""

FrameRule = Literal["processor", "qwen_vl_utils"]

FORMATS = (
    "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegts,mpegvideo,flv,asf,gif,ogg,h264,hevc,ivf,wav,mp3,aac,flac"
)
"""Containers that hold their frames themselves (some of them none: those are named in the message)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoClip:
    """Frames sampled from a file."""

    frames: NDArray[np.uint8]
    """[num_frames, height, width, 3] uint8 RGB; num_frames is even."""
    timestamps: tuple[float, ...]
    """Presentation time of each frame in seconds, the first frame of the file at 0."""
    sampled_fps: float
    """Frames per second after sampling."""
    source_fps: float
    """Average frames per second of the file."""


def sample_indices(
    num_frames: int,
    source_fps: float,
    fps: float,
    max_frames: int,
    min_frames: int = TEMPORAL_PATCH,
    rule: FrameRule = "processor",
) -> list[int]:
    """Which frames of a file to show: evenly spread, about `fps` a second, an even number of them.

    The count is the duration times `fps`, at least `min_frames`, at most `max_frames` and `num_frames`, rounded down
    to a multiple of two and never under two. By the rule `processor`, as Qwen's own processor does, frame i of n is
    i * num_frames / n, rounded down; by `qwen_vl_utils` it is i * (num_frames - 1) / (n - 1) in float32, rounded to
    the nearest, halves to even: the last frame is always shown.

    Raises:
        ValueError: for fewer than two frames or a `max_frames` under two.
    """
    if num_frames < TEMPORAL_PATCH or max_frames < TEMPORAL_PATCH:
        raise ValueError(f"at least two frames are needed: {min(num_frames, max_frames)}")
    wanted = min(max(num_frames / source_fps * fps, min_frames), max_frames, num_frames)
    # The tolerance keeps 8 frames at a source rate such as 30000/1001 from becoming 6.
    count = max(TEMPORAL_PATCH, math.floor(wanted / TEMPORAL_PATCH + 1e-6) * TEMPORAL_PATCH)
    if rule == "processor":
        return [i * num_frames // count for i in range(count)]
    spread = np.linspace(0, num_frames - 1, count, dtype=np.float32)
    return [int(i) for i in np.round(spread)]


def read_video(
    path: Path, *, fps: float, max_frames: int, min_frames: int = TEMPORAL_PATCH, rule: FrameRule = "processor"
) -> VideoClip:
    """Decode `path` and keep about `fps` frames a second, `max_frames` at most; see `sample_indices`.

    The file may have a variable frame rate: frames are chosen by number, `sampled_fps` is their average rate and
    `timestamps` are exact. Only chosen frames are held, so memory does not grow with the length of the file.

    Raises:
        DataError: the file is missing, empty, damaged, truncated, without video, or has fewer than two frames.
    """
    import av

    check_file(path, "video")
    if path.stat().st_size == 0:
        raise DataError(f"video is empty (0 bytes): {path}")
    try:
        return _read(path, partial(sample_indices, fps=fps, max_frames=max_frames, min_frames=min_frames, rule=rule))
    except (av.FFmpegError, OSError) as error:
        raise DataError(f"video cannot be decoded ({error.strerror or error}): {path}") from None


def write_video(path: Path, frames: Sequence[NDArray[np.uint8]] | NDArray[np.uint8], fps: Fraction | int) -> None:
    """Write RGB frames ([height, width, 3] uint8, even sizes) as H.264 in `path` (mp4).

    One encoder thread per call, so that equal frames give equal files.
    """
    import av

    height, width = frames[0].shape[:2]
    if height % 2 or width % 2:
        raise ValueError(f"height and width must be even: {height}x{width}")
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps))
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.options = {"crf": "18", "preset": "ultrafast", "threads": "1"}
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode(None))


def _open(path: Path) -> Any:
    """A container that cannot lead elsewhere: a playlist under any name would open what it lists, URLs included."""
    import av

    return av.open(str(path), options={"protocol_whitelist": "file", "format_whitelist": FORMATS})


def _read(path: Path, choose: Callable[[int, float], list[int]]) -> VideoClip:
    with _open(path) as container:
        if not container.streams.video:
            raise DataError(f"file has no video stream: {path}")
        times, source_fps = _frame_times(container, path)
    if len(times) < TEMPORAL_PATCH:
        raise DataError(f"video has too few frames, at least {TEMPORAL_PATCH} are needed: {path} ({len(times)})")
    indices = choose(len(times), source_fps)
    return VideoClip(
        frames=np.stack(_pictures(path, indices)),
        timestamps=tuple(times[i] - times[0] for i in indices),
        sampled_fps=len(indices) * source_fps / len(times),
        source_fps=source_fps,
    )


def _frame_times(container: Any, path: Path) -> tuple[list[float], float]:
    """Presentation times in seconds, in order, and the average rate. Reads packets, decodes nothing."""
    stream = container.streams.video[0]
    packets = [packet for packet in container.demux(stream) if packet.size > 0]
    # An mp4 lists its frames up front; other containers state no number (0) or an estimate.
    if "mp4" in container.format.name and len(packets) < stream.frames:
        raise DataError(f"video is truncated, {len(packets)} of {stream.frames} frames are there: {path}")
    if any(packet.is_corrupt for packet in packets):
        raise DataError(f"video is damaged or truncated: {path}")
    shown = [packet for packet in packets if not packet.is_discard]
    rate = float(stream.average_rate) if stream.average_rate else 0.0
    if not shown:
        raise DataError(f"video has no frames: {path}")
    if all(packet.pts is not None for packet in shown):
        times = sorted(float(packet.pts * packet.time_base) for packet in shown)
    elif rate > 0:
        times = [index / rate for index in range(len(shown))]
    else:
        raise DataError(f"video states neither times nor a frame rate: {path}")
    span = times[-1] - times[0]
    return times, (len(times) - 1) / span if span > 0 else rate or 1.0


def _pictures(path: Path, indices: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Frames `indices` (ascending, in order of presentation), decoded; nothing behind the last is decoded."""
    wanted, found = set(indices), []
    with _open(path) as container:
        for index, frame in enumerate(container.decode(container.streams.video[0])):
            if index in wanted:
                if frame.is_corrupt:
                    raise DataError(f"video is damaged at frame {index}: {path}")
                found.append(_upright(frame))
            if index >= indices[-1]:
                break
    if len({picture.shape for picture in found}) > 1:
        raise DataError(f"video changes its size between frames: {path}")
    if len(found) < len(indices):
        raise DataError(f"video is damaged, {len(found)} of {len(indices)} sampled frames decode: {path}")
    return found


def _upright(frame: Any) -> NDArray[np.uint8]:
    """[height, width, 3] RGB as a player shows it: files of telephones hold pictures that lie on their side, and by how
    many quarters they are to be turned (counter-clockwise). Other angles are left alone."""
    picture: NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
    quarters, rest = divmod(int(frame.rotation), 90)
    return np.rot90(picture, quarters) if quarters and not rest else picture
