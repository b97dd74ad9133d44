"""M-RoPE positions: counted by hand, by property, and against SGLang's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex_cli.rl.positions import MropePositions, mrope_positions, num_media_tokens, temporal_positions

IMAGE, VIDEO, START, END = 90, 91, 92, 93
PAD = {"image": IMAGE, "video": VIDEO}


@dataclass(frozen=True)
class Grid:
    kind: Literal["video", "image"]
    grid_thw: tuple[int, int, int]
    seconds_per_grid: float = 0.0


def tokens_of(grids: list[Grid], texts: list[int], merge: int = 2) -> list[int]:
    ids: list[int] = []
    for grid, length in zip(grids, texts, strict=False):
        ids += [1] * length + [START] + [PAD[grid.kind]] * num_media_tokens(grid.grid_thw, merge) + [END]
    return ids + [1] * texts[-1]


def positions(ids: list[int], grids: list[Grid], tokens_per_second: float | None = 2, merge: int = 2) -> MropePositions:
    return mrope_positions(
        ids,
        grids,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        merge_size=merge,
        tokens_per_second=tokens_per_second,
    )


def test_text_only_counts_up_on_all_axes() -> None:
    result = positions([1, 2, 3, 4], [])
    assert result.position_ids.tolist() == [[0, 1, 2, 3]] * 3
    assert result.position_ids.dtype == torch.int64
    assert result.rope_delta == 0
    assert result.media_spans == ()


def test_video_by_hand() -> None:
    # 2 text tokens, start, 3 steps x 1 x 2 merged patches one second (2 positions) apart, end, 1 text token.
    grid = Grid("video", (3, 2, 4), 1.0)
    result = positions([5, 6, START, *[VIDEO] * 6, END, 7], [grid])
    assert result.position_ids.tolist() == [
        [0, 1, 2, 3, 3, 5, 5, 7, 7, 8, 9],
        [0, 1, 2, 3, 3, 3, 3, 3, 3, 8, 9],
        [0, 1, 2, 3, 4, 3, 4, 3, 4, 8, 9],
    ]
    assert result.rope_delta == 10 - 11
    assert result.media_spans == ((3, 8),)


def test_image_by_hand_ignores_time() -> None:
    grid = Grid("image", (1, 4, 6), 3.0)
    result = positions([START, *[IMAGE] * 6, END], [grid])
    assert result.position_ids.tolist() == [
        [0, 1, 1, 1, 1, 1, 1, 4],
        [0, 1, 1, 1, 2, 2, 2, 4],
        [0, 1, 2, 3, 1, 2, 3, 4],
    ]


def test_long_clip_continues_after_its_time_not_its_width() -> None:
    # 24 steps of 28x28 px: time reaches 1 + 2*23 = 47, so text goes on at 48. An engine that advances by the
    # width (1) would go on at 2.
    grid = Grid("video", (24, 2, 2), 1.0)
    result = positions([START, *[VIDEO] * 24, END], [grid])
    assert result.position_ids[0, -2:].tolist() == [47, 48]
    assert result.position_ids[:, -1].tolist() == [48, 48, 48]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (1.0, [0, 2, 4, 6, 8, 10, 12]),
        (2 / 3, [0, 1, 2, 4, 5, 6, 8]),  # 3 sampled frames per second
        (0.5, [0, 1, 2, 3, 4, 5, 6]),
        (1 / 3, [0, 0, 1, 2, 2, 3, 4]),  # 6 sampled frames per second
        (0.1, [0, 0, 0, 0, 0, 1, 1]),
    ],
)
def test_temporal_positions_of_fractional_seconds(seconds: float, expected: list[int]) -> None:
    assert temporal_positions(7, seconds, 2) == expected
    as_float32 = float(torch.tensor(seconds, dtype=torch.float32))
    assert temporal_positions(7, as_float32, 2) == expected


@given(fps=st.integers(1, 60), steps=st.integers(1, 300))
def test_temporal_positions_equal_exact_arithmetic(fps: int, steps: int) -> None:
    assert temporal_positions(steps, 2 / fps, 2) == [step * 4 // fps for step in range(steps)]


grids_strategy = st.lists(
    st.builds(
        lambda kind, t, h, w, s: Grid(kind, (t if kind == "video" else 1, 2 * h, 2 * w), s),
        st.sampled_from(["video", "image"]),
        st.integers(1, 9),
        st.integers(1, 4),
        st.integers(1, 4),
        st.sampled_from([0.1, 1 / 3, 0.5, 2 / 3, 1.0, 2.0]),
    ),
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(grids=grids_strategy, texts=st.lists(st.integers(0, 4), min_size=4, max_size=4))
def test_properties_of_any_prompt(grids: list[Grid], texts: list[int]) -> None:
    ids = tokens_of(grids, [*texts[: len(grids)], texts[-1]]) or [1]
    result = positions(ids, grids)
    pos = result.position_ids
    assert pos.shape == (3, len(ids))
    assert int(pos.min()) == 0
    assert result.rope_delta == int(pos.max()) + 1 - len(ids)
    # A text token is equal on all axes and one past everything before it; time never runs backwards.
    media = {i for first, last in result.media_spans for i in range(first, last + 1)}
    for i in range(len(ids)):
        if i not in media:
            expected = int(pos[:, :i].max()) + 1 if i else 0
            assert pos[:, i].tolist() == [expected] * 3
    assert bool((pos[0].diff() >= 0).all())
    # No two tokens share a triple unless the clock does not resolve their grid steps.
    if all(g.kind == "image" or g.seconds_per_grid >= 0.5 for g in grids):
        assert len({tuple(column) for column in pos.T.tolist()}) == len(ids)
    for (first, last), grid in zip(result.media_spans, grids, strict=True):
        assert set(ids[first : last + 1]) == {PAD[grid.kind]}
        assert last - first + 1 == num_media_tokens(grid.grid_thw, 2)


@pytest.mark.parametrize(
    ("ids", "grids", "message"),
    [
        ([START, VIDEO, VIDEO, END], [Grid("video", (1, 2, 2))], "needs 1 placeholders of id 91, got: 2"),
        ([START, VIDEO, END], [Grid("video", (2, 2, 2), 1.0)], "needs 2 placeholders of id 91, got: 1"),
        ([START, VIDEO, END], [Grid("image", (1, 2, 2))], "of id 90, got: 0"),
        ([START, VIDEO, END], [], "placeholder without a medium at token: 1"),
        ([1, 2], [Grid("video", (1, 2, 2))], "got: 0"),
        ([1, VIDEO], [Grid("video", (1, 2, 2))], "no vision start token"),
        ([START, VIDEO], [Grid("video", (1, 3, 2))], "does not divide into 2x2 blocks"),
    ],
)
def test_mismatch_is_refused(ids: list[int], grids: list[Grid], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        positions(ids, grids)


@pytest.mark.parametrize(
    "grids",
    [
        [Grid("video", (4, 8, 8), 1.0)],
        [Grid("video", (12, 4, 6), 0.5)],
        [Grid("video", (24, 2, 2), 1.0), Grid("video", (3, 4, 4), 2.0)],
        [Grid("image", (1, 6, 4)), Grid("video", (5, 4, 8), 1 / 3), Grid("image", (1, 2, 2))],
        [Grid("video", (9, 4, 4), 2 / 3)],
    ],
)
def test_sglang_computes_the_same(grids: list[Grid]) -> None:
    rope_index = load_sglang_rope_index()
    ids = tokens_of(grids, [*[3, 1, 2, 4][: len(grids)], 5])
    images = [g.grid_thw for g in grids if g.kind == "image"]
    videos = [g for g in grids if g.kind == "video"]
    theirs, delta = rope_index(
        spatial_merge_size=2,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        model_type="qwen2_5_vl",
        tokens_per_second=2,
        input_ids=torch.tensor([ids]),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor([g.grid_thw for g in videos]) if videos else None,
        second_per_grid_ts=torch.tensor([g.seconds_per_grid for g in videos]) if videos else None,
    )
    ours = positions(ids, grids)
    assert torch.equal(ours.position_ids, theirs[:, 0])
    assert ours.rope_delta == int(delta)


@pytest.mark.parametrize(
    "grids", [[Grid("video", (5, 4, 6), 3.0)], [Grid("image", (1, 6, 4)), Grid("video", (9, 2, 2))]]
)
def test_without_a_rate_temporal_steps_are_counted(grids: list[Grid]) -> None:
    ids = tokens_of(grids, [*[3, 1, 2, 4][: len(grids)], 5])
    images = [g.grid_thw for g in grids if g.kind == "image"]
    theirs, delta = load_sglang_rope_index()(
        spatial_merge_size=2,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        model_type="qwen2_vl",
        input_ids=torch.tensor([ids]),
        image_grid_thw=torch.tensor(images) if images else None,
        video_grid_thw=torch.tensor([g.grid_thw for g in grids if g.kind == "video"]),
    )
    ours = positions(ids, grids, tokens_per_second=None)
    assert torch.equal(ours.position_ids, theirs[:, 0])
    assert ours.rope_delta == int(delta)


def load_sglang_rope_index():  # type: ignore[no-untyped-def]
    """The one file of SGLang that holds the function: it needs torch alone, its package needs much more."""
    import importlib.util
    from pathlib import Path

    package = importlib.util.find_spec("sglang")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "srt/layers/rotary_embedding/mrope_rope_index.py"
    spec = importlib.util.spec_from_file_location("sglang_rope_index", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_rope_index
