"""Writes checkpoints in child processes and kills them; run by test_checkpoint.py.

`kill FOLDER N`: a child writes checkpoint after checkpoint until it is killed at a random moment, again and again until
N kills have torn a write; after every kill the newest one must be whole. `full FOLDER`: a file may not grow beyond a
limit.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from rollplex_cli.core.errors import RunFailedError
from rollplex_cli.core.files import write_atomic
from rollplex_cli.engines.weights.shards import Box
from rollplex_cli.runtime import checkpoint
from rollplex_cli.runtime.checkpoint import Entry

TENSORS, ELEMENTS = 24, 1 << 17


def write(folder: Path, step: int) -> None:
    """A checkpoint in which every value is the step."""
    box = Box.whole((ELEMENTS,))
    entries = [
        Entry(tensor=f"t{i}", full=box.shape, box=box, values=torch.full(box.shape, float(step)))
        for i in range(TENSORS)
    ]
    checkpoint.begin(folder, step)
    files = checkpoint.write(folder, step, 0, entries)
    checkpoint.commit(folder, step, files, {"updates": step}, keep=2)
    write_atomic(folder / "finished", str(step))  # a kill may fall here, too


def verify(folder: Path, least: int) -> int:
    """Step of the newest checkpoint, after reading all of it."""
    found = checkpoint.newest(folder)
    assert found is not None and found.step >= least, (found, least)
    assert len(found.shapes()) == TENSORS
    for name in found.shapes():
        assert (found.read(name) == found.step).all(), name
    return found.step


def kill(folder: Path, times: int) -> None:
    rng = random.Random(5)
    checkpoint.CHUNK_BYTES = 1 << 20
    write(folder, 1)
    told: list[dict[str, int | bool]] = []
    for _ in range(20 * times):
        if sum(kill["in_the_middle"] for kill in told) == times:
            break
        start = verify(folder, 1)
        child = os.fork()
        if child == 0:
            for step in range(start + 1, start + 10_000):
                write(folder, step)
            os._exit(1)
        time.sleep(rng.uniform(0.02, 0.3))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        step = verify(folder, int((folder / "finished").read_text()))
        told.append({"step": step, "in_the_middle": any(folder.glob(".writing-*"))})
    print(json.dumps(told))


def full(folder: Path) -> None:
    write(folder, 1)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        write(folder, 2)
    except RunFailedError as error:
        checkpoint.discard(folder, 2)
        print(json.dumps({"message": error.message, "hint": error.hint, "newest": verify(folder, 1)}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "kill":
        kill(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        full(Path(sys.argv[2]))
