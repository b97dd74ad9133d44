"""The real torchrun over fake workers: every way a run can end, and that nothing is left behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollplex_cli.core import errors
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.launch import torchrun
from rollplex_cli.launch.run_folder import create_run
from rollplex_cli.launch.subprocess import Child, find_processes, send_signal
from rollplex_cli.launch.supervise import run_child, supervise
from rollplex_cli.plan.build import build_plan
from rollplex_cli.profile.load import load_profile

pytestmark = pytest.mark.scenario
FAKE = "fake_worker"


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "WORKER", FAKE)
    monkeypatch.setattr(torchrun, "PREPARE", FAKE)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return create_run(tmp_path / "a run", profile_yaml="name: x\n", plan_json="{}", argv=["rollplex"])


def go(run: RunFolder, *words: str, prepare: str = "ok", on_tick: object = None) -> errors.RollplexError | None:
    behaviour = {str(rank): word for rank, word in enumerate(words)} | {"prepare": prepare}
    (run.root / "behaviour.json").write_text(json.dumps(behaviour))
    profile = load_profile("tiny", [f"topology.ranks_per_node={len(words)}"])
    try:
        supervise(profile, build_plan(profile), run, on_tick=on_tick or (lambda: None))  # type: ignore[arg-type]
    except errors.RollplexError as error:
        return error
    finally:
        assert find_processes(FAKE, str(run.root)) == []
    return None


def workers_running(run: RunFolder, num_ranks: int) -> bool:
    texts = [path.read_text() for path in run.status_dir.glob("rank*.json")]
    return sum('"running"' in text for text in texts) == num_ranks


class SignalWhenRunning:
    """Sends this process signals, one per entry, once all workers run."""

    def __init__(self, run: RunFolder, num_ranks: int, *numbers: int) -> None:
        self.run, self.num_ranks, self.numbers = run, num_ranks, list(numbers)

    def __call__(self) -> None:
        if self.numbers and (workers_running(self.run, self.num_ranks)):
            os.kill(os.getpid(), self.numbers.pop(0))


def test_a_run_that_goes_well_prepares_once_and_logs_by_rank(run: RunFolder, capfd: pytest.CaptureFixture[str]) -> None:
    ticks: list[float] = []
    assert go(run, "ok", "ok", on_tick=lambda: ticks.append(time.monotonic())) is None
    assert run.rank_log(1).read_text() == "rank 1: ok\n"
    assert len(ticks) >= 4
    assert go(run, "ok", "ok") is None
    assert (run.root / "prepared.txt").read_text() == "once\n"
    assert capfd.readouterr() == ("", "")


def test_a_failing_rank_decides_and_its_waiting_peer_is_ended(run: RunFolder) -> None:
    error = go(run, "wait", "fail")
    assert type(error) is errors.RewardError
    assert error.message == "rank 1: the reward raised"


def test_a_rank_killed_from_outside_is_named(run: RunFolder) -> None:
    started = time.monotonic()
    error = go(run, "deaf", "die")
    assert time.monotonic() - started < 25  # its peer hears nothing, and torchrun alone would give it 30 s
    assert error is not None
    assert error.message == "rank 1 was killed by signal 9 and left no reason; its log ends with:\n  rank 1: die"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_every_worker_and_ends_in_75(run: RunFolder, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    error = go(run, "wait", "wait", on_tick=SignalWhenRunning(run, 2, number))
    assert error is not None
    assert (error.exit_code, error.message) == (75, "stopped after step 3")
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_ends_workers_that_do_not_listen(run: RunFolder) -> None:
    error = go(run, "deaf", "deaf", on_tick=SignalWhenRunning(run, 2, signal.SIGINT, signal.SIGINT))
    assert error is not None
    assert error.exit_code == 75


def test_workers_do_not_survive_a_launcher_that_was_killed(run: RunFolder) -> None:
    def kill_launcher() -> None:
        if workers_running(run, 1):
            send_signal(find_processes("rollplex_cli.launch.elastic", FAKE, str(run.root)), signal.SIGKILL)

    error = go(run, "wait", on_tick=kill_launcher)
    assert type(error) is errors.RankLostError
    assert error.message.startswith("rank 0 ended and left no reason")


def test_a_live_view_that_breaks_leaves_no_process(run: RunFolder) -> None:
    def fail() -> None:
        if workers_running(run, 1):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        go(run, "wait", on_tick=fail)


def test_a_terminal_that_goes_away_stops_the_run_in_order(run: RunFolder) -> None:
    def hang_up() -> None:
        if workers_running(run, 2):
            os.kill(os.getpid(), signal.SIGHUP)
            raise OSError(errno.EIO, "Input/output error")

    error = go(run, "wait", "wait", on_tick=hang_up)
    assert error is not None
    assert (error.exit_code, error.message) == (75, "stopped after step 3")


def test_processes_that_outlived_their_supervisor_are_ended_by_the_next(run: RunFolder) -> None:
    (run.root / "behaviour.json").write_text('{"0": "deaf"}')
    left = Child([sys.executable, "-m", FAKE, str(run.root.resolve())], log=run.launcher_log,
                 env={**os.environ, "RANK": "0"})  # fmt: skip
    while not workers_running(run, 1):
        time.sleep(0.05)
    assert go(run, "ok") is None
    assert left.poll() == -signal.SIGKILL


def test_preparation_says_why_it_failed(run: RunFolder) -> None:
    error = go(run, "ok", prepare="data")
    assert type(error) is errors.DataError
    assert (error.message, error.exit_code) == ("unreadable: `a.mp4`", 2)
    error = go(run, "ok", prepare="crash")
    assert type(error) is errors.RunFailedError
    assert error.message == "the preparation ended with exit code 1; its log ends with:\n  no space left"
    assert not run.status(0).exists()


def test_run_folder_is_free_again_after_every_end(run: RunFolder) -> None:
    go(run, "ok", prepare="crash")
    assert go(run, "ok") is None


def test_helper_processes_tell_their_end(run: RunFolder) -> None:
    (run.root / "behaviour.json").write_text('{"prepare": "crash"}')
    argv = torchrun.prepare_argv(run)
    with pytest.raises(errors.RunFailedError, match=r"export ended with exit code 1; its log ends with:\n  no space"):
        run_child(argv, run, dict(os.environ), what="export")
    (run.root / "behaviour.json").write_text("{}")
    run_child(argv, run, dict(os.environ), what="export")


def test_signals_are_collected_in_the_main_thread_only_while_supervising(run: RunFolder) -> None:
    assert threading.current_thread() is threading.main_thread()
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    go(run, "ok")
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before


def test_a_killed_supervisor_takes_its_processes_along(run: RunFolder) -> None:
    (run.root / "behaviour.json").write_text('{"0": "wait"}')
    program = (
        "import sys; from pathlib import Path; from rollplex_cli.core.paths import RunFolder;"
        "from rollplex_cli.launch import torchrun; torchrun.WORKER = torchrun.PREPARE = 'fake_worker';"
        "from rollplex_cli.launch.supervise import supervise; from rollplex_cli.plan.build import build_plan;"
        "from rollplex_cli.profile.load import load_profile; profile = load_profile('tiny');"
        "supervise(profile, build_plan(profile), RunFolder(Path(sys.argv[1])))"
    )
    child = Child([sys.executable, "-c", program, str(run.root)], log=run.logs_dir / "supervisor.log", env=os.environ)
    wait_until(lambda: workers_running(run, 1))
    child.send(signal.SIGKILL)
    wait_until(lambda: not find_processes(FAKE, str(run.root)))


def wait_until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)
