from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rollplex_cli.core import errors
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.status import RankStatus, failed_rank, write_status
from rollplex_cli.launch.outcome import outcome
from rollplex_cli.launch.run_folder import begin_start

TORCHRUN_SAW = "E1129 api.py:874] failed (exitcode: {code}) local_rank: {rank} (pid: 77) of binary: python\n"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.make()
    return run


def say(run: RunFolder, *statuses: RankStatus) -> None:
    for status in statuses:
        write_status(run.status(status.rank), status)


def done(rank: int) -> RankStatus:
    return RankStatus(rank=rank, state="done", exit_code=0)


def ended(
    run: RunFolder, num_ranks: int = 2, *, exit_code: int = 1, signalled: bool = False
) -> errors.RollplexError | None:
    return outcome(run, num_ranks, exit_code=exit_code, signalled=signalled, port=4711)


def test_all_done_is_no_error(run: RunFolder) -> None:
    say(run, done(0), done(1))
    assert ended(run, exit_code=0) is None


def test_the_rank_that_failed_first_decides_not_the_one_that_followed(run: RunFolder) -> None:
    say(run, failed_rank(0, errors.PeerFailedError("rank 1 failed")), failed_rank(1, errors.ParityError("off by 0.3")))
    error = ended(run)
    assert type(error) is errors.ParityError
    assert error.message == "rank 1: off by 0.3"
    assert error.hint == f"the log is `{run.rank_log(1)}`"


def test_a_single_rank_is_not_named_and_its_hint_stays(run: RunFolder) -> None:
    say(run, failed_rank(0, errors.StallError("no task finished", hint="look"), waiting=["reward of group 3"]))
    error = ended(run, 1)
    assert error is not None
    assert error.message == "no task finished (waiting for reward of group 3)"
    assert error.hint == f"look; the log is `{run.rank_log(0)}`"


@pytest.mark.parametrize(
    "kind", [errors.DataError, errors.DoesNotFitError, errors.ClusterError, errors.TargetNotReachedError]
)
def test_exit_codes_come_through(run: RunFolder, kind: type[errors.RollplexError]) -> None:
    say(run, *(failed_rank(rank, kind("so it is", hint="do this")) for rank in range(2)))
    error = ended(run)
    assert (type(error), error and error.exit_code) == (kind, kind.exit_code)
    assert error is not None
    assert (error.message, error.hint) == ("so it is", "do this")


def test_a_killed_rank_is_named_whatever_its_peers_complain_of(run: RunFolder) -> None:
    say(run, failed_rank(0, RuntimeError("Connection closed by peer")), RankStatus(rank=1, state="running", step=3))
    run.launcher_log.write_text(TORCHRUN_SAW.format(code=-9, rank=1))
    run.rank_log(1).write_text("step 1\nstep 2\n")
    error = ended(run)
    assert type(error) is errors.RankLostError
    assert error.message == "rank 1 was killed by signal 9 and left no reason; its log ends with:\n  step 1\n  step 2"
    assert error.hint is not None
    assert "memory" in error.hint
    assert str(run.rank_log(1)) in error.hint


def test_words_of_an_earlier_start_are_not_its_last(run: RunFolder) -> None:
    run.rank_log(0).write_text("old words\n")
    begin_start(run)
    run.launcher_log.write_text("ImportError: libfoo\n")
    say(run, RankStatus(rank=0, state="running"))
    error = ended(run, 1)
    assert error is not None
    assert error.message.endswith("its log ends with:\n  ImportError: libfoo")
    with run.rank_log(0).open("a") as stream:
        stream.write("new words\n")
    error = ended(run, 1)
    assert error is not None
    assert error.message.endswith("its log ends with:\n  new words")


def test_a_peer_that_torchrun_ended_does_not_hide_the_reason(run: RunFolder) -> None:
    say(run, failed_rank(0, errors.RewardError("raised")), RankStatus(rank=1, state="running"))
    run.launcher_log.write_text(TORCHRUN_SAW.format(code=1, rank=0))
    error = ended(run)
    assert error is not None
    assert error.message == "rank 0: raised"


def test_asked_to_stop(run: RunFolder) -> None:
    stopped = errors.InterruptedRunError("stopped after step 7, checkpoint written")
    say(run, *(failed_rank(rank, stopped) for rank in range(2)))
    error = ended(run, signalled=True)
    assert error is not None
    assert error.exit_code == 75
    assert error.message == "stopped after step 7, checkpoint written"
    assert error.hint == f"continue with `rollplex train --resume --run-dir {run.root}`"


def test_stopped_before_any_rank_had_begun(run: RunFolder) -> None:
    run.launcher_log.write_text(TORCHRUN_SAW.format(code=-15, rank=0))
    error = ended(run, signalled=True)
    assert type(error) is errors.InterruptedRunError
    assert error.message == "interrupted before the first checkpoint"


def test_a_stop_while_a_rank_was_being_loaded_is_an_interruption_whatever_the_others_say(run: RunFolder) -> None:
    say(run, failed_rank(1, RuntimeError("Connection was likely closed")))
    run.launcher_log.write_text(TORCHRUN_SAW.format(code=-15, rank=0))
    error = outcome(run, 2, exit_code=1, signalled=True, port=1, num_nodes=2)
    assert type(error) is errors.InterruptedRunError
    error = outcome(run, 2, exit_code=1, signalled=False, port=1, num_nodes=2)
    assert type(error) is errors.RunFailedError


def test_a_failure_while_stopping_is_still_a_failure(run: RunFolder) -> None:
    say(run, failed_rank(0, errors.RunFailedError("disk full")), failed_rank(1, errors.InterruptedRunError("stopped")))
    error = ended(run, signalled=True)
    assert error is not None
    assert (error.exit_code, error.message) == (1, "rank 0: disk full")


def test_a_signal_that_comes_when_all_is_done_stops_nothing(run: RunFolder) -> None:
    say(run, done(0), done(1))
    assert ended(run, exit_code=0, signalled=True) is None


def test_a_rank_that_a_stop_ended_while_it_started_is_no_failure_of_its_peer(run: RunFolder) -> None:
    say(run, failed_rank(0, RuntimeError("Connection closed by peer")))
    run.launcher_log.write_text(TORCHRUN_SAW.format(code=-15, rank=1))
    error = ended(run, signalled=True)
    assert type(error) is errors.InterruptedRunError


def test_a_rank_that_vanishes_with_exit_code_0_is_no_success(run: RunFolder) -> None:
    say(run, done(0))
    error = ended(run, exit_code=0)
    assert error is not None
    assert error.message == "rank 1 ended and left no reason"


def test_port_taken_between_the_look_and_the_start(run: RunFolder) -> None:
    run.launcher_log.write_text("RuntimeError: errno: 98 - Address already in use\nmore\n")
    error = ended(run)
    assert type(error) is errors.ClusterError
    assert error.message == "the rendezvous port is in use: 4711"


def test_no_rank_started(run: RunFolder) -> None:
    run.launcher_log.write_text("Traceback\nModuleNotFoundError: No module named 'torch'\n")
    error = ended(run)
    assert type(error) is errors.ClusterError
    assert error.message.endswith("ModuleNotFoundError: No module named 'torch'")


def test_worker_that_ends_while_importing_names_its_last_words(run: RunFolder) -> None:
    run.launcher_log.write_text("ImportError: libfoo\n" + TORCHRUN_SAW.format(code=1, rank=0))
    error = ended(run)
    assert type(error) is errors.RunFailedError
    assert error.message.startswith("rank 0 ended with exit code 1 and left no reason")
    assert "ImportError: libfoo" in error.message


PEER = "control: rank 1 to arrive there too"


def stalled(rank: int, text: str, *waiting: str, at: float) -> RankStatus:
    status = failed_rank(rank, errors.StallError(text), step=4, phase="LEARN", waiting=list(waiting))
    return dataclasses.replace(status, time=at)


def test_a_rank_that_hangs_is_named_not_the_one_that_waited_for_it(run: RunFolder) -> None:
    say(run, stalled(0, "rank 0 completed nothing for 60 s", "control: phase UPDATE", PEER, at=100.0))
    write_status(
        run.status(1), RankStatus(rank=1, state="running", step=4, phase="LEARN", waiting=["trainer lane: `x`"])
    )
    error = ended(run)
    assert type(error) is errors.StallError
    head, *waits = error.message.splitlines()
    assert head.startswith("rank 1 hangs: it has not moved for ")
    assert head.endswith(" s, in step 4, phase LEARN; last words of every rank:")
    assert waits == [
        f"  rank 0, step 4, phase LEARN: control: phase UPDATE; {PEER}",
        "  rank 1, step 4, phase LEARN: trainer lane: `x`",
    ]


def test_a_stuck_reward_is_named_though_its_peer_timed_out_first(run: RunFolder) -> None:
    text = "rank 1: the reward function has not returned for 60 s: `reward[2]` of step 4, phase LEARN"
    say(
        run,
        stalled(0, "rank 0 completed nothing for 60 s", PEER, at=100.0),
        stalled(1, text, "host lane: `reward[2]` running for 60 s", at=100.1),
    )
    error = ended(run)
    assert error is not None
    assert error.message.startswith(text + "; last words of every rank:\n  rank 0, ")
    assert error.message.count("reward[2]") == 2


def test_a_lost_rank_of_another_node_is_found_by_its_process(run: RunFolder) -> None:
    statuses = [RankStatus(rank=r, state="running", pid=70 + r, waiting=["something"]) for r in (0, 1, 2)]
    say(run, *statuses, dataclasses.replace(failed_rank(3, RuntimeError("closed")), pid=73))
    run.node_log(0).write_text(TORCHRUN_SAW.format(code=1, rank=1).replace("77", "73"))
    run.node_log(1).write_text(TORCHRUN_SAW.format(code=-9, rank=0).replace("77", "72"))
    error = outcome(run, 4, exit_code=1, signalled=False, port=1, num_nodes=2)
    assert type(error) is errors.RankLostError
    assert error.message.startswith("rank 2 was killed by signal 9")
    assert "\n  rank 0, step 0, phase none: something" in error.message


def test_a_rank_that_was_ended_because_another_had_died_is_not_taken_for_it(run: RunFolder) -> None:
    say(
        run,
        RankStatus(rank=0, state="running", pid=70, time=110.0),
        RankStatus(rank=1, state="running", pid=71, time=100.0),
    )
    for rank in (0, 1):
        run.node_log(rank).write_text(TORCHRUN_SAW.format(code=-9, rank=0).replace("77", str(70 + rank)))
    error = outcome(run, 2, exit_code=1, signalled=False, port=1, num_nodes=2)
    assert error is not None
    assert error.message.startswith("rank 1 was killed by signal 9")
