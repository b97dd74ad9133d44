"""One task of a job: `python -m rollplex_cli.launch.slurm.node RUN_DIR`, once on every node.

Node 0 holds the run folder, prepares it, tells the others in `status/launch.json` where to meet, and decides how the
run ended. Every node starts its torchrun and passes signals on to its ranks. A run with a checkpoint goes on from it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import ClusterError, RollplexError
from rollplex_cli.core.files import read_json, write_atomic
from rollplex_cli.core.log import talk, warn
from rollplex_cli.core.paths import RunFolder
from rollplex_cli.launch.outcome import interrupted, outcome, read_statuses
from rollplex_cli.launch.record import LaunchRecord, new_record, read_record, write_record
from rollplex_cli.launch.slurm.environment import JobEnvironment, port_of_job, read_environment
from rollplex_cli.launch.slurm.lead import lead_warning, measure
from rollplex_cli.launch.supervise import TICK_S, prepare_run, run_workers, stop_requests, supervised
from rollplex_cli.launch.torchrun import LOOPBACK, Rendezvous, choose_port, worker_argv, worker_env
from rollplex_cli.plan.build import build_plan
from rollplex_cli.profile.load import load_profile

if TYPE_CHECKING:
    from rollplex_cli.launch.supervise import StopRequests
    from rollplex_cli.plan.build import Plan
    from rollplex_cli.profile.schema import Profile

ANY = "0.0.0.0"
NODE_END_S = 20.0
"""How long node 0 waits for the last word of the others after its own ranks have ended."""
WARN_EVERY_S = 5.0


def main(argv: list[str] | None = None) -> int:
    """Run this node's part; returns the exit code of the run on node 0, and 0 on the others."""
    run = RunFolder(Path((sys.argv[1:] if argv is None else argv)[0]))
    try:
        task = read_environment(os.environ)
        node = _Node(run, task)
        if task.node == 0:
            node.lead()
        else:
            node.follow()
    except RollplexError as error:
        talk(f"error: {error.message}")
        if error.hint:
            talk(f"hint: {error.hint}")
        return error.exit_code
    return 0


class _Node:
    """A node's supervisor."""

    def __init__(self, run: RunFolder, task: JobEnvironment) -> None:
        self._run, self._task = run, task
        self._profile: Profile = load_profile(run.profile)
        self._plan: Plan = build_plan(self._profile)
        self._env = worker_env(self._profile, os.environ, task.node)
        job = read_json(run.job) or {}
        self._lead_s = job.get("stop_lead_s")
        self._record = LaunchRecord()
        self._next_look = 0.0
        if self._plan.topology.num_nodes != task.num_nodes:
            raise ClusterError(
                f"the profile needs {self._plan.topology.num_nodes} nodes, the job step has: {task.num_nodes}"
            )

    def lead(self) -> None:
        """Node 0. Raises the reason the run ended with."""
        run, task, num_ranks = self._run, self._task, self._plan.topology.num_ranks
        talk(f"start {task.start_id} of `{run.root}` on {task.num_nodes} nodes")
        record = new_record(run, job_id=task.job_id, restart=task.restart, num_nodes=task.num_nodes)
        with supervised(run, record) as (_, requests):
            prepare_run(run, self._env, requests, lambda: None)
            address, port = _address(task.num_nodes), self._port()
            self._record = dataclasses.replace(record, stage="workers", endpoint=f"{address}:{port}")
            write_record(run, self._record)
            code = self._work(requests)
            self._await_others()
            if requests.kill:
                raise interrupted(run, read_statuses(run, num_ranks))
            error = outcome(
                run, num_ranks, exit_code=code, signalled=requests.stop, port=port, num_nodes=task.num_nodes
            )
            if error is not None:
                raise error
        talk("every rank is done")

    def follow(self) -> None:
        """Every other node: wait for node 0, then work as it does. How it ended is node 0's to say."""
        with stop_requests() as requests:
            while (record := read_record(self._run)) is None or not self._is_ready(record):
                if requests.stop or (record is not None and self._is_mine(record) and record.stage == "ended"):
                    return
                time.sleep(TICK_S)
            self._record = record
            self._work(requests)

    def _work(self, requests: StopRequests) -> int:
        address, _, port = self._record.endpoint.rpartition(":")
        if address == LOOPBACK:
            self._env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        meeting = Rendezvous(
            port=int(port), address=address, num_nodes=self._task.num_nodes, job_id=self._task.start_id
        )
        argv = worker_argv(self._plan, self._run, meeting)
        log = self._run.node_log(self._task.node)
        code = run_workers(argv, self._env, log, self._run, requests, self._look, lambda: any(self._ends()))
        said = {"start": self._task.start_id, "exit_code": code}
        write_atomic(self._run.node_status(self._task.node), json.dumps(said) + "\n")
        return code

    def _is_mine(self, record: LaunchRecord) -> bool:
        return (record.job_id, record.restart) == (self._task.job_id, self._task.restart)

    def _is_ready(self, record: LaunchRecord) -> bool:
        return self._is_mine(record) and record.stage == "workers"

    def _port(self) -> int:
        wanted = self._profile.runtime.master_port or port_of_job(self._task.job_id)
        try:
            return choose_port(wanted, ANY)
        except ClusterError:
            if self._profile.runtime.master_port:
                raise
            return choose_port(0, ANY)

    def _look(self) -> None:
        """Now and then: is the lead time enough for what was measured?"""
        if self._task.node or self._lead_s is None or self._record.warnings or time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + WARN_EVERY_S
        text = lead_warning(measure(self._run), float(self._lead_s))
        if text is not None:
            warn(text)
            self._record = dataclasses.replace(self._record, warnings=[text])
            write_record(self._run, self._record)

    def _ends(self) -> list[int]:
        """Exit codes of the other nodes whose torchrun has ended in this start."""
        others = (node for node in range(self._task.num_nodes) if node != self._task.node)
        said = (read_json(self._run.node_status(node)) for node in others)
        return [int(word["exit_code"]) for word in said if word and word.get("start") == self._task.start_id]

    def _await_others(self) -> None:
        end = time.monotonic() + NODE_END_S
        while len(self._ends()) < self._task.num_nodes - 1 and time.monotonic() < end:
            time.sleep(TICK_S)


def _address(num_nodes: int) -> str:
    """This node's name for the others; the loopback address where it is alone or has no name that resolves."""
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        name = ""
    if num_nodes == 1 or not name:
        return LOOPBACK
    return name


if __name__ == "__main__":
    sys.exit(main())
