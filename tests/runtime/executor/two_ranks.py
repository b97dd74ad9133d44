"""Two gloo ranks in one training group: every trainer task holds a collective, every rank has its own delays.

Run by test_order.py: `python two_ranks.py RANK PORT MODE SEED`; prints the order of trainer tasks as JSON.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import random
import sys
import threading
import time

import torch
import torch.distributed as dist

from rollplex_cli.core.names import Lane, Phase, TaskKey, TaskKind
from rollplex_cli.runtime.control.peers import Peers
from rollplex_cli.runtime.executor.executor import Executor, StoppedError
from rollplex_cli.runtime.executor.graph import build_step_graph
from rollplex_cli.runtime.executor.order import OrderChannel
from rollplex_cli.runtime.executor.phases import PhaseMachine
from rollplex_cli.runtime.executor.schedules import schedule_from
from rollplex_cli.runtime.executor.theta import ThetaGuard

K = TaskKind
GROUPS = 6


def main(rank: int, port: int, mode: str, seed: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=datetime.timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    control = dist.new_group([0, 1], backend="gloo")
    channel = OrderChannel(control, leader=0)
    peers = Peers(dist.TCPStore("127.0.0.1", port, 2, is_master=False), rank, 2)
    rng = random.Random(f"{seed}/{rank}")
    machine, theta = PhaseMachine(), ThetaGuard()
    graph = build_step_graph(range(GROUPS), reference=True, exchange=True)
    order: list[str] = []

    def body(key: TaskKey) -> None:
        if mode == "fail" and rank == 1 and key == TaskKey(K.ACTOR_SUFFIX, 2):
            raise RuntimeError("injected at actor_suffix[2] of rank 1")
        if key.kind is K.UPDATE:
            with theta.write("update"):
                pass
        if Lane(graph.tasks[key].lane) is Lane.TRAINER:
            number = torch.tensor([list(K).index(key.kind) * 100 + key.group])
            both = number.clone()
            dist.all_reduce(both)
            assert int(both) == 2 * int(number), f"ranks ran different tasks: {key}"
            order.append(str(key))

    def delay(_key: TaskKey, _when: str) -> None:
        time.sleep(rng.random() * 0.004)

    executor = Executor(
        graph,
        schedule_from("rollplex", early_groups=True, prefixes_in_flight=2),
        machine,
        theta,
        dict.fromkeys(K, body),
        boundary=delay,
        channel=channel,
    )

    def decode() -> None:
        # Wall-clock order of completion differs between the ranks; the leader's order counts.
        groups = list(range(GROUPS))
        rng.shuffle(groups)
        executor.begin_decodes([TaskKey(K.DECODE, g) for g in groups])
        for g in groups:
            time.sleep(rng.random() * 0.01)
            executor.complete_decode(TaskKey(K.DECODE, g))
            if mode == "skip" and rank == 0 and g == 3:
                executor.cancel_group(3)
        executor.run(Lane.ROLLOUT)

    def guarded(job: object) -> None:
        with contextlib.suppress(StoppedError, RuntimeError):
            job()  # type: ignore[operator]

    last = 0.0

    def tick() -> None:
        nonlocal last
        if time.monotonic() - last > 0.05:
            last = time.monotonic()
            peers.check_failure()

    jobs = [decode, lambda: executor.run(Lane.TRAINER), lambda: executor.run(Lane.HOST)]
    threads = [threading.Thread(target=guarded, args=(j,), daemon=True) for j in jobs]
    started = time.monotonic()
    try:
        machine.to(Phase.GENERATE)
        for thread in threads:
            thread.start()
        for done, then in (
            (K.DECODE, Phase.LEARN),
            (K.ACTOR_PREFIX_BACKWARD, Phase.UPDATE),
            (K.UPDATE, Phase.PUBLISH),
            (K.PUBLISH, None),
        ):
            executor.wait([done], tick)
            if then is not None:
                peers.meet(str(then), {}, tick)
                machine.to(then)
                executor.phase_changed()
        for thread in threads:
            thread.join(10)
        print(json.dumps({"order": order}), flush=True)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as caught:
        executor.stop()
        error = peers.first_cause(caught)
        if mode == "fail" and rank == 1:
            peers.announce_failure(str(error))
        print(json.dumps({"error": f"{type(error).__name__}: {error}", "s": time.monotonic() - started}), flush=True)
        if rank == 0:
            time.sleep(1)  # it holds the store
        import os

        os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
