"""What the trainer may do beside decode, and on which stream."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rollplex_cli.core.names import TaskKey, TaskKind
from rollplex_cli.profile.load import load_profile
from rollplex_cli.profile.sharing import parse_policy
from rollplex_cli.runtime.sharing.calibrate import Measurement, best_choice, longest_pass
from rollplex_cli.runtime.sharing.sharing import Choice, Sharing


class Streams:
    """Remembers what was entered."""

    def __init__(self) -> None:
        self.entered: list[tuple[int, bool]] = []

    def enter(self, reserved_sms: int, *, high_priority: bool = False) -> None:
        self.entered.append((reserved_sms, high_priority))


def sharing(policy: str) -> tuple[Sharing, Streams]:
    streams = Streams()
    return Sharing(parse_policy(policy), cast("Any", streams), 132), streams


@pytest.mark.parametrize(
    ("policy", "beside_decode"),
    [("streams", (0, True)), ("priority", (0, False)), ("fence:16", (16, False)), ("partition:70/30", (92, False))],
)
def test_the_trainer_is_confined_only_while_decode_runs(policy: str, beside_decode: tuple[int, bool]) -> None:
    own, streams = sharing(policy)
    own.enter(decoding=True)
    own.enter(decoding=False)
    assert streams.entered == [beside_decode, (0, False)]
    assert own.may_overlap()


def test_only_tasks_of_the_trainer_enter_a_stream() -> None:
    own, streams = sharing("fence:16")
    done: list[TaskKey] = []
    bodies = own.around({TaskKind.REWARD: done.append, TaskKind.ACTOR_PREFIX: done.append}, lambda: True)
    for kind in bodies:
        bodies[kind](TaskKey(kind, 0))
    assert len(done) == 2
    assert streams.entered == [(16, False)]


def test_auto_follows_its_measurements_as_the_batch_shrinks() -> None:
    own, streams = sharing("auto")
    assert own.may_overlap() and own.reserved_sms() == 32  # before it has measured
    own.decide(
        [
            Choice(batch=64, overlap=False, reserved_sms=16, efficiency=1.0),
            Choice(batch=8, overlap=True, reserved_sms=48, efficiency=1.2),
        ]
    )
    own.report(64)
    assert not own.may_overlap()
    own.report(500)  # more than was measured: the largest that was
    assert not own.may_overlap()
    own.report(8)
    assert own.may_overlap()
    own.enter(decoding=True)
    assert streams.entered == [(48, False)]
    own.follow(parse_policy("serial"))
    assert not own.may_overlap()


def measured(sms: int, efficiency: float) -> Measurement:
    return Measurement(
        batch=8, reserved_sms=sms, decode_alone=1.0, decode=1.0, prefix_alone=1.0, prefix=0.0,
        efficiency=efficiency, watts=None, sm_mhz=None,
    )  # fmt: skip


@pytest.mark.parametrize(("fenced", "sms"), [(1.24, 0), (1.26, 32)])
def test_a_fence_has_to_gain(fenced: float, sms: int) -> None:
    assert best_choice([measured(0, 1.2), measured(32, fenced)]).reserved_sms == sms


@pytest.mark.parametrize(("best", "overlap"), [(1.019, False), (1.02, True), (1.3, True)])
def test_what_does_not_pay_is_not_overlapped(best: float, overlap: bool) -> None:
    choice = best_choice([measured(0, 0.9), measured(32, best), measured(16, 1.0)])
    assert (choice.overlap, choice.reserved_sms, choice.efficiency) == (overlap, 32, best)


@pytest.mark.parametrize(
    ("overrides", "lengths"),
    [
        ([], [300]),
        (["schedule.prefix_pack_tokens=400"], [200, 150]),
        (["schedule.prefix_pack_tokens=400", "reuse.vision=true"], [300]),
    ],
)
def test_prefixes_are_measured_by_passes_of_a_step(overrides: list[str], lengths: list[int]) -> None:
    profile = load_profile("tiny", ["model.freeze_vision=true", "data.max_prompt_tokens=400", *overrides])
    inputs: Any = [SimpleNamespace(num_tokens=n, prompt=SimpleNamespace(media=("video",))) for n in (200, 150, 300)]
    assert [prompt.num_tokens for prompt in longest_pass(profile, inputs)] == lengths
