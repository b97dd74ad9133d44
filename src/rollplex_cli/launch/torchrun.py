"""Command line and environment of the workers. Pure, but for the look for a free port."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import ClusterError
from rollplex_cli.launch.elastic import ENDED_BY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rollplex_cli.core.paths import RunFolder
    from rollplex_cli.plan.build import Plan
    from rollplex_cli.profile.schema import Profile

LOOPBACK = "127.0.0.1"
UNASKED_PORTS = range(20_000, 32_768)
"""Ports that Linux gives to nobody who does not ask for them."""
WORKER = "rollplex_cli.runtime.worker"
PREPARE = "rollplex_cli.runtime.prepare"
MAX_CTAS = "32"
"""Blocks of one collective's kernel: two take 64 of the 108 multiprocessors and more that a data centre GPU has."""
NODE = "ROLLPLEX_NODE"
"""Environment variable of every process of a run: the number of its node in the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the nodes of a job meet. The defaults are one node that meets itself."""

    port: int
    address: str = LOOPBACK
    """Host name of the first node."""
    num_nodes: int = 1
    job_id: str | None = None
    """Set where a scheduler started the job: the nodes then find each other by it instead of by `node_rank`."""


def worker_argv(plan: Plan, run: RunFolder, rendezvous: Rendezvous) -> list[str]:
    """The launcher's command line on one node."""
    options = {"nnodes": str(rendezvous.num_nodes), "nproc-per-node": str(plan.topology.ranks_per_node)}
    if rendezvous.job_id is None:
        options |= {"node-rank": "0", "master-addr": rendezvous.address, "master-port": str(rendezvous.port)}
    else:
        endpoint = f"{rendezvous.address}:{rendezvous.port}"
        options |= {"rdzv-backend": "c10d", "rdzv-id": rendezvous.job_id, "rdzv-endpoint": endpoint}
        if rendezvous.address == LOOPBACK:
            # All nodes are this machine, whose own name need not resolve.
            options["local-addr"] = LOOPBACK
    # A restarted worker would begin with half of its peers' state: a failed run ends and is resumed as a whole.
    options["max-restarts"] = "0"
    options["signals-to-handle"] = signal.Signals(ENDED_BY).name
    flags = [f"--{key}={value}" for key, value in sorted(options.items())]
    return [sys.executable, "-m", "rollplex_cli.launch.elastic", *flags, "-m", WORKER, str(run.root.resolve())]


def prepare_argv(run: RunFolder) -> list[str]:
    """The command line of the preparation."""
    return [sys.executable, "-m", PREPARE, str(run.root.resolve())]


def worker_env(profile: Profile, base: Mapping[str, str], node: int = 0) -> dict[str, str]:
    """The environment of every process of a run: `base` with what the run needs on top."""
    env = dict(base) | {
        NODE: str(node),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Progress bars of libraries have no place in a log; the live view shows progress.
        "TQDM_DISABLE": "1",
        # Nothing is fetched while a run goes on: what is missing must fail at once, not on the network.
        "HF_HUB_OFFLINE": "1",
    }
    if profile.runtime.torch_threads:
        threads = str(profile.runtime.torch_threads)
        env |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    if profile.topology.device == "cpu":
        env["CUDA_VISIBLE_DEVICES"] = ""
    elif "TORCH_NCCL_TRACE_BUFFER_SIZE" not in base:
        # PyTorch's flight recorder walks the Python stack at every collective, and a trainer launches thousands of them
        # a step. Messages about stalls come from the run's own log.
        env.setdefault("TORCH_FR_BUFFER_SIZE", "0")
    if profile.rollout_beside_training and profile.topology.device != "cpu":
        # A collective of decode and one of the trainer have to find room on a GPU at once, whichever comes first.
        env.setdefault("NCCL_MAX_CTAS", MAX_CTAS)
    if profile.topology.num_nodes == 1 and sys.platform == "linux":
        # Without it gloo looks up the host's own name, which many containers cannot resolve.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def choose_port(wanted: int, address: str = LOOPBACK) -> int:
    """The wanted rendezvous port, or a free one for 0.

    Raises:
        ClusterError: the wanted port is in use.
    """
    if not wanted:
        # Until the launcher listens, a port that the kernel hands out to connections may go to somebody else's.
        for port in random.sample(UNASKED_PORTS, 32):
            with contextlib.suppress(ClusterError):
                return choose_port(port, address)
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the launcher's own listener does: a port whose last connections are merely closing is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, wanted))
            probe.listen()
        except OSError as error:
            raise port_in_use(wanted) from error
        return int(probe.getsockname()[1])


def port_in_use(port: int) -> ClusterError:
    """The error for a rendezvous port that another program holds."""
    hint = "set `runtime.master_port` to another port, or to 0 for a free one"
    return ClusterError(f"the rendezvous port is in use: {port}", hint=hint)
