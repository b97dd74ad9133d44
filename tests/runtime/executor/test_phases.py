"""The phase machine follows its table, whatever is asked of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollplex_cli.core.errors import PhaseError
from rollplex_cli.core.names import Phase
from rollplex_cli.runtime.executor.phases import ALLOWED, PhaseMachine, is_allowed


@given(st.lists(st.sampled_from(list(Phase)), max_size=30))
def test_any_sequence_of_wishes_follows_the_table(wishes: list[Phase]) -> None:
    machine = PhaseMachine()
    for wanted in wishes:
        before = machine.state
        if is_allowed(before, wanted):
            machine.to(wanted)
            assert machine.state is wanted
        else:
            with pytest.raises(PhaseError, match=f"`{before}` to `{wanted}`"):
                machine.to(wanted)
            assert machine.state is before


def test_a_whole_step_with_a_second_minibatch_is_allowed() -> None:
    machine = PhaseMachine()
    for wanted in (
        Phase.GENERATE,
        Phase.LEARN,
        Phase.UPDATE,
        Phase.LEARN,
        Phase.UPDATE,
        Phase.PUBLISH,
        Phase.CHECKPOINT,
        Phase.EVALUATE,
        Phase.GENERATE,
    ):
        machine.to(wanted)
    assert machine.state is Phase.GENERATE


def test_checkpoint_and_evaluate_lie_between_publish_and_generate() -> None:
    for phase in (Phase.CHECKPOINT, Phase.EVALUATE):
        sources = {p for p in Phase if phase in ALLOWED[p]}
        assert sources <= {Phase.PUBLISH, Phase.CHECKPOINT, Phase.EVALUATE}
        assert Phase.UPDATE not in ALLOWED[phase]


def test_every_state_can_fail_and_failed_is_final() -> None:
    for phase in Phase:
        assert is_allowed(phase, Phase.FAILED) is (phase is not Phase.FAILED)
        assert not is_allowed(Phase.FAILED, phase)


def test_the_error_names_state_wanted_and_allowed() -> None:
    with pytest.raises(PhaseError) as caught:
        PhaseMachine().to(Phase.UPDATE)
    assert "`PUBLISH` to `UPDATE`" in caught.value.message
    assert "CHECKPOINT, EVALUATE, FAILED, GENERATE" in (caught.value.hint or "")


def test_a_failing_exit_hook_fails_the_machine() -> None:
    machine = PhaseMachine()

    def refuse() -> None:
        raise PhaseError("a reader is active")

    machine.on_exit(Phase.PUBLISH, refuse)
    entered = []
    machine.on_enter(Phase.GENERATE, lambda: entered.append(True))
    with pytest.raises(PhaseError, match="reader is active"):
        machine.to(Phase.GENERATE)
    assert machine.state is Phase.FAILED
    assert not entered
