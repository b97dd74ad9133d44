"""Loading ahead changes nothing; bad samples are errors or deterministic replacements."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import torch

from rollplex_cli.core.errors import DataError, LongPromptError
from rollplex_cli.data.loader import MAX_REPLACEMENTS, PromptCache, PromptLoader, build_all
from rollplex_cli.data.order import BatchOrder
from rollplex_cli.data.types import Media, Prompt, Sample

SAMPLES = [Sample(sample_id=f"s{i}", question="q", answer="a", kind="k") for i in range(11)]


@dataclass
class FakeBuilder:
    bad: frozenset[str] = frozenset()
    delay_s: float = 0.0
    error: type[DataError] = DataError
    built: list[str] = field(default_factory=list)

    def build(self, sample: Sample) -> Prompt:
        time.sleep(self.delay_s)
        self.built.append(sample.sample_id)
        if sample.sample_id in self.bad:
            raise self.error(f"sample `{sample.sample_id}`: broken")
        patches = torch.zeros(2, 4)
        media = Media(kind="image", patches=patches, grid_thw=(1, 1, 2), seconds_per_grid=0.0, content_hash=0)
        return Prompt(sample=sample, token_ids=(1,), media=(media,))


def order(**kwargs: Any) -> BatchOrder:
    return BatchOrder(len(SAMPLES), **({"seed": 4, "prompts_per_step": 4} | kwargs))


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.sample.sample_id for prompt in prompts]


@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_batches_follow_the_order_whatever_the_workers(num_workers: int) -> None:
    with PromptLoader(SAMPLES, FakeBuilder(delay_s=0.001), order(), num_workers=num_workers) as loader:
        for step in range(6):
            assert ids(loader.batch(step)) == [f"s{row}" for row in order().batch(step)]


def test_a_resumed_loader_continues_with_the_same_prompts() -> None:
    with PromptLoader(SAMPLES, FakeBuilder(), order()) as first:
        straight = [ids(first.batch(step)) for step in range(5)]
    with PromptLoader(SAMPLES, FakeBuilder(), order()) as second:
        assert ids(second.batch(3)) == straight[3]
        assert ids(second.batch(4)) == straight[4]
        assert ids(second.batch(1)) == straight[1]


def test_following_steps_are_built_ahead() -> None:
    builder = FakeBuilder()
    with PromptLoader(SAMPLES, builder, order(), prefetch_steps=2) as loader:
        loader.batch(0)
        deadline = time.monotonic() + 5
        while len(builder.built) < 12 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert builder.built == [f"s{row}" for step in range(3) for row in order().batch(step)]


def test_close_leaves_no_thread() -> None:
    loader = PromptLoader(SAMPLES, FakeBuilder(), order(), num_workers=2)
    loader.batch(0)
    loader.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prompts")]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_sample_is_an_error(num_workers: int) -> None:
    bad = f"s{order().batch(1)[2]}"
    with PromptLoader(SAMPLES, FakeBuilder(frozenset([bad])), order(), num_workers=num_workers) as loader:
        loader.batch(0)
        with pytest.raises(DataError, match=bad):
            loader.batch(1)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_skipped_sample_is_replaced_alike_for_any_degree(num_ranks: int) -> None:
    row = order().batch(1)[2]
    batches: list[list[str]] = [[], [], []]
    for rank in range(num_ranks):
        mine = order(rank=rank, num_ranks=num_ranks)
        builder = FakeBuilder(frozenset([f"s{row}"]))
        with PromptLoader(SAMPLES, builder, mine, on_bad_media="skip", num_workers=1) as loader:
            for step, batch in enumerate(batches):
                batch += ids(loader.batch(step))
            assert set(loader.skipped) <= {f"s{row}"}
    expected = [[f"s{r}" for r in order().batch(step)] for step in range(3)]
    # Slot 2 of step 1 shows what slot 2 of step 2 shows.
    expected[1][2] = expected[2][2]
    assert batches == expected


def test_skipping_reports_and_ends() -> None:
    bad = frozenset(sample.sample_id for sample in SAMPLES)
    loader = PromptLoader(SAMPLES, FakeBuilder(bad), order(), num_workers=0, on_bad_media="skip")
    with pytest.raises(DataError, match=rf"{MAX_REPLACEMENTS + 1} in a row.*sample `s\d+`: broken"):
        loader.batch(0)
    assert set(loader.skipped) <= bad
    assert all("broken" in reason for reason in loader.skipped.values())


@pytest.mark.parametrize(("on_bad_media", "on_long_prompt"), [("skip", "error"), ("error", "skip")])
def test_long_prompts_have_a_choice_of_their_own(
    on_bad_media: Literal["error", "skip"], on_long_prompt: Literal["error", "skip"]
) -> None:
    row = f"s{order().batch(0)[1]}"
    builder = FakeBuilder(frozenset([row]), error=LongPromptError)
    loader = PromptLoader(
        SAMPLES, builder, order(), num_workers=0, on_bad_media=on_bad_media, on_long_prompt=on_long_prompt
    )
    if on_long_prompt == "error":
        with pytest.raises(LongPromptError, match=row):
            loader.batch(0)
    else:
        assert ids(loader.batch(0))[1] == f"s{order().batch(1)[1]}"
        assert set(loader.skipped) == {row}


def test_samples_of_other_splits_are_left_out_alike() -> None:
    other = Sample(sample_id="held out", question="q", answer="a", kind="k")
    bad = FakeBuilder(frozenset([other.sample_id]))
    loader = PromptLoader(SAMPLES, bad, order(), num_workers=0, on_bad_media="skip")
    assert loader.build(other) is None and "broken" in loader.skipped["held out"]
    assert loader.build(SAMPLES[0]) is not None
    with pytest.raises(DataError, match="held out"):
        PromptLoader(SAMPLES, bad, order(), num_workers=0).build(other)


def test_rows_left_out_have_a_limit() -> None:
    bad = frozenset(f"s{order().batch(step)[0]}" for step in range(2))
    loader = PromptLoader(SAMPLES, FakeBuilder(bad), order(), num_workers=0, on_bad_media="skip", max_bad_rows=1)
    with pytest.raises(DataError, match=r"`data\.max_bad_rows` allows \(1\)"):
        loader.batch(0)


def test_cache_builds_once_and_keeps_to_its_limit() -> None:
    builder = FakeBuilder()
    one = 2 * 4 * 4
    cache = PromptCache(builder, max_bytes=2 * one + 5)
    first = [cache.build(sample) for sample in SAMPLES[:3]]
    again = [cache.build(sample) for sample in SAMPLES[:3]]
    assert [a is b for a, b in zip(first, again, strict=True)] == [True, True, False]
    assert builder.built == ["s0", "s1", "s2", "s2"]
    assert cache.num_bytes == 2 * one


def test_cache_does_not_take_two_samples_of_one_name_for_one() -> None:
    cache = PromptCache(FakeBuilder())
    other = Sample(sample_id="s0", question="another", answer="a", kind="k")
    assert cache.build(SAMPLES[0]).sample is SAMPLES[0]
    assert cache.build(other).sample is other


def test_build_all_keeps_the_order() -> None:
    assert ids(build_all(SAMPLES, FakeBuilder(delay_s=0.001), num_workers=3)) == [s.sample_id for s in SAMPLES]
