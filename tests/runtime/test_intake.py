"""Groups in flight from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from rollplex_cli.core.errors import UsageError
from rollplex_cli.data.loader import PromptLoader
from rollplex_cli.data.order import BatchOrder
from rollplex_cli.data.types import Prompt, Sample
from rollplex_cli.engines.inputs import MediaTokens
from rollplex_cli.profile.load import load_profile
from rollplex_cli.runtime.groups.intake import Intake

if TYPE_CHECKING:
    from rollplex_cli.runtime.groups.intake import Started

TOKENS = MediaTokens.from_config({"model_type": "qwen2_5_vl", "vision_config": {}})
SAMPLES = [Sample(sample_id=f"s{i}", question="q", answer="a", kind="k") for i in range(40)]


@dataclass
class Builder:
    built: list[str] = field(default_factory=list)

    def build(self, sample: Sample) -> Prompt:
        self.built.append(sample.sample_id)
        return Prompt(sample=sample, token_ids=(1, 2, 3), media=())


def intake(rank: int = 0, num_ranks: int = 1) -> Intake:
    """Four groups a step over all ranks and two in excess on each."""
    profile = load_profile("tiny", ["rollout.extra_groups=2", "algorithm.prompts_per_step=4"])
    order = BatchOrder(len(SAMPLES), seed=1, prompts_per_step=4, rank=rank, num_ranks=num_ranks)
    return Intake(profile, PromptLoader(SAMPLES, Builder(), order, num_workers=0), TOKENS)


def names(groups: list[Started]) -> list[str]:
    return [group.input.prompt.sample.sample_id for group in groups]


def line(count: int, **kwargs: Any) -> list[str]:
    """The first prompts of a rank's own line."""
    order = BatchOrder(len(SAMPLES), **({"seed": 1, "prompts_per_step": 4} | kwargs))
    return [f"s{order.index(order.position(n))}" for n in range(count)]


def test_what_is_left_comes_first_and_no_prompt_is_lost() -> None:
    groups = intake()
    first = groups.start()
    assert names(first) == line(6)
    groups.leave([first[1], first[4]])
    second = groups.start()
    assert names(second) == [line(6)[1], line(6)[4], *line(10)[6:]]
    assert [g.times for g in second] == [1, 1, 0, 0, 0, 0]
    assert [g.seeds for g in second[:2]] == [first[1].seeds, first[4].seeds]
    groups.leave([])
    assert names(groups.start()) == line(16)[10:]


def test_ranks_have_lines_of_their_own() -> None:
    lines = [names(intake(rank, 2).start()) for rank in range(2)]
    assert lines[0] == line(4, rank=0, num_ranks=2)
    order = BatchOrder(len(SAMPLES), seed=1, prompts_per_step=4)
    whole = [f"s{row}" for step in range(2) for row in order.batch(step)]
    assert sorted(lines[0] + lines[1]) == sorted(whole)


def test_a_checkpoint_goes_on_as_the_run_it_was_taken_from() -> None:
    one = intake()
    first = one.start()
    for group in first:
        group.engine_id = group.number
    one.leave([first[5]])
    assert one.drop_partial() == [5]
    state = one.to_json()
    other = intake()
    other.load([state], 0, 1)
    assert other.to_json() == state
    mine, theirs = one.start(), other.start()
    assert [(g.number, g.seeds, g.times, g.engine_id) for g in mine] == [
        (g.number, g.seeds, g.times, g.engine_id) for g in theirs
    ]
    assert names(mine) == names(theirs)
    with pytest.raises(UsageError, match=r"as many ranks as before \(1\), not: 2"):
        intake().load([state], 0, 2)
