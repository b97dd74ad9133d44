"""Sampling, decoding and the faults of video files, on real files."""

from __future__ import annotations

import struct
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex_cli.core.errors import DataError
from rollplex_cli.data.video import read_video, sample_indices, write_video


def ramp(num_frames: int, height: int = 32, width: int = 48) -> np.ndarray:
    """Frame i is grey 10 * i: its number can be read off a decoded frame."""
    frames = np.empty((num_frames, height, width, 3), dtype=np.uint8)
    frames[:] = (10 * np.arange(num_frames, dtype=np.uint8))[:, None, None, None]
    return frames


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    path = tmp_path / "clip with spaces.mp4"
    write_video(path, ramp(16), 4)
    return path


def numbers(frames: np.ndarray) -> list[int]:
    return [round(float(frame.mean()) / 10) for frame in frames]


@pytest.mark.parametrize(
    ("fps", "max_frames", "expected", "sampled_fps"),
    [
        (4.0, 64, list(range(16)), 4.0),
        (2.0, 64, [0, 2, 4, 6, 8, 10, 12, 14], 2.0),
        (2.0, 4, [0, 4, 8, 12], 1.0),
        (2.0, 5, [0, 4, 8, 12], 1.0),  # an odd limit is rounded down to a pair
        (0.1, 64, [0, 8], 0.5),  # never under one pair
        (30.0, 64, list(range(16)), 4.0),  # never more than there are
        (3.0, 64, [0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14], 3.0),
    ],
)
def test_frames_times_and_rate(
    clip: Path, fps: float, max_frames: int, expected: list[int], sampled_fps: float
) -> None:
    video = read_video(clip, fps=fps, max_frames=max_frames)
    assert numbers(video.frames) == expected
    assert video.frames.dtype == np.uint8
    assert video.frames.shape[1:] == (32, 48, 3)
    assert video.timestamps == pytest.approx([index / 4 for index in expected])
    assert video.source_fps == pytest.approx(4.0)
    assert video.sampled_fps == pytest.approx(sampled_fps)


def test_a_rate_that_is_no_binary_fraction(tmp_path: Path) -> None:
    path = tmp_path / "ntsc.mp4"
    write_video(path, ramp(24), Fraction(24000, 1001))
    video = read_video(path, fps=8.0, max_frames=64)
    assert numbers(video.frames) == [0, 3, 6, 9, 12, 15, 18, 21]
    assert video.sampled_fps == pytest.approx(8000 / 1001, rel=1e-3)


def test_bidirectional_frames_come_in_order_of_presentation(tmp_path: Path) -> None:
    path = tmp_path / "b.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        stream.options = {"crf": "10", "bf": "3", "x264-params": "b-adapt=0:bframes=3"}
        for frame in ramp(16):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    assert numbers(read_video(path, fps=4.0, max_frames=64).frames) == list(range(16))


@given(
    num_frames=st.integers(2, 5000),
    source_fps=st.floats(1, 120),
    fps=st.floats(0.1, 60),
    max_frames=st.integers(2, 800),
)
def test_any_sampling_is_even_ascending_and_within_bounds(
    num_frames: int, source_fps: float, fps: float, max_frames: int
) -> None:
    indices = sample_indices(num_frames, source_fps, fps, max_frames)
    assert len(indices) % 2 == 0
    assert 2 <= len(indices) <= min(num_frames, max_frames)
    assert indices[0] == 0
    assert indices[-1] < num_frames
    assert all(a < b for a, b in pairwise(indices))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such video: .*none\.mp4"):
        read_video(tmp_path / "none.mp4", fps=2.0, max_frames=8)


def test_folder_instead_of_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such video"):
        read_video(tmp_path, fps=2.0, max_frames=8)


def test_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.mp4"
    path.touch()
    with pytest.raises(DataError, match="0 bytes"):
        read_video(path, fps=2.0, max_frames=8)


def test_file_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "text.mp4"
    path.write_text("this is not a video\n" * 200, encoding="utf-8")
    with pytest.raises(DataError, match="cannot be decoded"):
        read_video(path, fps=2.0, max_frames=8)


def test_truncated_without_its_index(clip: Path) -> None:
    data = clip.read_bytes()
    clip.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match="cannot be decoded"):
        read_video(clip, fps=2.0, max_frames=8)


def test_truncated_with_its_index(tmp_path: Path) -> None:
    path = tmp_path / "fast.mp4"
    generator = np.random.default_rng(0)
    with av.open(str(path), "w", options={"movflags": "faststart"}) as container:
        stream = container.add_stream("libx264", rate=4)
        stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
        for _ in range(16):
            noise = generator.integers(0, 255, size=(32, 48, 3), dtype=np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(noise, format="rgb24")))
        container.mux(stream.encode(None))
    assert len(read_video(path, fps=4.0, max_frames=64).frames) == 16
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3])
    with pytest.raises(DataError, match="truncated"):
        read_video(path, fps=4.0, max_frames=64)


def test_damaged_in_the_middle(clip: Path) -> None:
    data = bytearray(clip.read_bytes())
    start = data.index(b"mdat") + 4
    end = data.index(b"moov")
    data[start:end] = bytes(end - start)
    clip.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"cannot be decoded|damaged"):
        read_video(clip, fps=2.0, max_frames=8)


def test_sound_only(tmp_path: Path) -> None:
    path = tmp_path / "sound.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    with pytest.raises(DataError, match="no video stream"):
        read_video(path, fps=2.0, max_frames=8)


def test_one_frame(tmp_path: Path) -> None:
    path = tmp_path / "still.mp4"
    write_video(path, ramp(1), 4)
    with pytest.raises(DataError, match=r"too few frames.*\(1\)"):
        read_video(path, fps=2.0, max_frames=8)


def test_no_frame_at_all(tmp_path: Path) -> None:
    for name, message in {
        "none.mp4": "no video stream",
        "none.avi": "no frames",
        "none.mkv": "cannot be decoded",
    }.items():
        with av.open(str(tmp_path / name), "w") as container:
            stream = container.add_stream("libx264", rate=4)
            stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
            container.start_encoding()
        with pytest.raises(DataError, match=message):
            read_video(tmp_path / name, fps=2.0, max_frames=8)


@pytest.mark.parametrize(
    ("matrix", "quarters"),
    [((1, 0, 0, 1), 0), ((0, 1, -1, 0), -1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)],
)
def test_pictures_of_a_telephone_stand_upright(tmp_path: Path, matrix: tuple[int, ...], quarters: int) -> None:
    """An mp4 says by a matrix how its pictures are to be turned."""
    path = tmp_path / "turned.mp4"
    frames = np.zeros((4, 32, 48, 3), dtype=np.uint8)
    frames[:, :8, :] = 255  # bright above
    write_video(path, frames, 2)
    plain = read_video(path, fps=2.0, max_frames=4).frames
    content = bytearray(path.read_bytes())
    start = content.index(b"tkhd") + 4 + 40
    a, b, c, d = (value << 16 for value in matrix)
    content[start : start + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    path.write_bytes(bytes(content))
    turned = read_video(path, fps=2.0, max_frames=4).frames
    assert np.array_equal(turned, np.rot90(plain, quarters, axes=(1, 2)))


def test_frames_of_two_sizes(tmp_path: Path) -> None:
    parts = []
    for height, width in ((32, 48), (64, 96)):
        path = tmp_path / f"{height}.h264"
        with av.open(str(path), "w", format="h264") as container:
            stream = container.add_stream("libx264", rate=4)
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            for frame in ramp(8, height, width):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode(None))
        parts.append(path.read_bytes())
    both = tmp_path / "both.h264"
    both.write_bytes(b"".join(parts))
    with pytest.raises(DataError, match="changes its size"):
        read_video(both, fps=2.0, max_frames=8)


def test_odd_sizes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="31x48"):
        write_video(tmp_path / "odd.mp4", ramp(2, height=31), 4)
