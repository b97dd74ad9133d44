"""Four gloo ranks, one training group over two rollout replicas of two, both lanes at once in real collectives.

Run by test_stress.py: `python four_ranks.py RANK PORT MODE UNITS`; prints what the rank did as JSON. With `--no-order`
after it the lanes launch as they come, which gloo survives.
"""

from __future__ import annotations

import datetime
import json
import os
import random
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from rollplex_cli.core.names import Lane
from rollplex_cli.engines.collectives import name_of
from rollplex_cli.plan.topology import build_topology
from rollplex_cli.runtime.control.peers import Peers
from rollplex_cli.runtime.launches.build import Launches, build_launches, open_order
from rollplex_cli.runtime.launches.watch import CollectiveWatch

if TYPE_CHECKING:
    from collections.abc import Callable

RANKS, FAULT_AT = 4, 40


class StoppedError(Exception):
    """What the lanes get where the step was stopped."""


class FourRanks:
    """One of the ranks: its groups, its launch order, and its two lanes."""

    def __init__(self, rank: int, port: int, mode: str, units: int, *, ordered: bool) -> None:
        store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=rank == 0, timeout=datetime.timedelta(seconds=120))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        self.rank, self.mode, self.units = rank, mode, units
        self.peers = Peers(store.clone(), rank, RANKS)
        topology = build_topology(1, RANKS, 4, 2)
        place = topology.places[rank]
        self.train = dist.new_group([0, 1, 2, 3])
        replicas = [dist.new_group(list(ranks)) for ranks in topology.rollout_tp_groups]
        self.replica, self.number = replicas[place.replica], place.replica
        order = open_order(topology, place, store.clone(), "test") if ordered else None
        self.launches: Launches = build_launches(order, on_device=False)
        self.watch = CollectiveWatch((self.launches.rollout, self.launches.trainer), self.peers)
        self.done: list[str] = []
        """Kinds in the order in which this rank launched them."""
        self.stopped = threading.Event()
        self.errors: list[str] = []
        self.launches.check_with(self.raise_if_stopped)

    def raise_if_stopped(self) -> None:
        if self.stopped.is_set():
            raise StoppedError

    def roll_out(self) -> None:
        """Batches of several all-reduces over the replica, as many as the replica's own seed says."""
        pause, plan = random.Random(f"{self.rank} pause"), random.Random(f"{self.number} plan")
        self.launches.begin(Lane.ROLLOUT, "decode")
        log, name = self.launches.rollout, name_of("rollout group", self.replica)
        for number in range(self.units):
            time.sleep(pause.random() * 0.0006)
            with log.launch("forward batch", name):
                self.done.append("R")
                for part in range(plan.randint(1, 3)):
                    self.sum(self.replica, 2, number + part)

    def train_all(self) -> None:
        """All-reduces over all four ranks."""
        pause = random.Random(f"{self.rank} trainer's pause")
        log, name = self.launches.trainer, name_of("training group", self.train)
        for number in range(self.units):
            self.launches.begin(Lane.TRAINER, f"actor_prefix[{number // 10}]")
            time.sleep(pause.random() * 0.0006)
            if number == FAULT_AT and self.rank == 1 and self.mode != "plain":
                if self.mode == "hang":
                    self.stopped.wait()
                raise RuntimeError("injected")
            with log.launch("all_reduce", name, 4096):
                self.done.append("T")
                self.sum(self.train, RANKS, number)

    def sum(self, group: dist.ProcessGroup, size: int, number: int) -> None:
        values = torch.full((8,), float(number + self.rank))
        dist.all_reduce(values, group=group)
        expected = float(sum(number + rank for rank in dist.get_process_group_ranks(group)))
        assert dist.get_world_size(group) == size
        assert values.tolist() == [expected] * 8, (self.rank, number)

    def guarded(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception as error:
            self.errors.append(f"{type(error).__name__}: {error}".strip(": "))
            self.stopped.set()

    def run(self) -> dict[str, object]:
        threads = [
            threading.Thread(target=self.guarded, args=(job,), daemon=True) for job in (self.roll_out, self.train_all)
        ]
        for thread in threads:
            thread.start()
        if self.mode == "hang":
            return {"lines": self.wait_for_lines()}
        while any(thread.is_alive() for thread in threads) and not self.stopped.is_set():
            time.sleep(0.02)
            if self.mode == "fail" and self.peers.heard("failed", 1):
                self.stopped.set()
        if self.mode == "fail" and self.rank == 1:
            self.peers.say("failed", "yes")
        if self.mode == "plain":
            for thread in threads:
                thread.join(60)
        stuck = self.stuck(threads)
        return {"order": "".join(self.done), "errors": self.errors, "stuck": stuck}

    def stuck(self, threads: list[threading.Thread]) -> list[str]:
        """What lanes are at once nothing moves any more; one inside a collective whose peer is gone cannot end."""
        logs = (self.launches.rollout, self.launches.trainer)
        before: list[Any] = []
        states: list[str] = []
        for _ in range(20):
            for thread in threads:
                thread.join(1.5)
            states = [log.last.state if log.last is not None else "" for log in logs]
            at = [(log.last, state, t.is_alive()) for log, state, t in zip(logs, states, threads, strict=True)]
            if at == before or not any(thread.is_alive() for thread in threads):
                break
            before = at
        return [state for thread, state in zip(threads, states, strict=True) if thread.is_alive()]

    def wait_for_lines(self) -> list[str]:
        """What the rank says once every rank has told where it stands."""
        lines: list[str] = []
        for _ in range(200):
            time.sleep(0.05)
            self.watch.tell()
            lines = self.watch.lines()
            others = [rank for rank in range(RANKS) if rank != 1]
            if self.rank == 1 and all(self.peers.heard("printed", rank) for rank in others):
                break
            if any("rank 1 is at" in line for line in lines):
                break
        return lines


def main() -> None:
    rank, port, mode, units = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    ranks = FourRanks(rank, port, mode, units, ordered="--no-order" not in sys.argv)
    print(json.dumps(ranks.run()), flush=True)
    ranks.peers.say("printed", "yes")
    while rank == 0 and not all(ranks.peers.heard("printed", other) for other in range(1, RANKS)):
        time.sleep(0.05)  # it holds the store
    os._exit(0)


if __name__ == "__main__":
    main()
