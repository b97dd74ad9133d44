"""A worker and a preparation of twenty lines: what they do is in `RUN/behaviour.json`, rank to word."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from rollplex_cli.core import errors
from rollplex_cli.core.log import redirect_output
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.core.status import PrepareStatus, RankStatus, failed_prepare, failed_rank, write_status


def main() -> None:
    run = RunFolder(Path(sys.argv[1]))
    words = json.loads((run.root / "behaviour.json").read_text())
    if "RANK" not in os.environ:
        prepare(run, words.get("prepare", "ok"))
        return
    rank = int(os.environ["RANK"])
    redirect_output(run.rank_log(rank))
    work(run, rank, words[str(rank)])


def prepare(run: RunFolder, word: str) -> None:
    with (run.root / "prepared.txt").open("a") as stream:
        stream.write("once\n")
    if word == "crash":
        raise SystemExit("no space left")
    if word == "data":
        write_status(run.prepare_status, failed_prepare(errors.DataError("unreadable: `a.mp4`")))
        sys.exit(2)
    run.base_dir.mkdir(exist_ok=True)
    write_status(run.prepare_status, PrepareStatus(stage="done"))


def work(run: RunFolder, rank: int, word: str) -> None:
    def stop(*_: object) -> None:
        write_status(run.status(rank), failed_rank(rank, errors.InterruptedRunError("stopped after step 3")))
        sys.exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if word == "deaf" else stop)
    write_status(run.status(rank), RankStatus(rank=rank, state="running", pid=os.getpid()))
    print(f"rank {rank}: {word}", flush=True)
    if word == "fail":
        write_status(run.status(rank), failed_rank(rank, errors.RewardError("the reward raised")))
        sys.exit(1)
    if word == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if word in ("wait", "deaf"):
        time.sleep(120)
    write_status(run.status(rank), RankStatus(rank=rank, state="done", exit_code=0))


if __name__ == "__main__":
    main()
