"""What Slurm tells a task through environment variables, as typed values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollplex_cli.core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnvironment:
    """One task of a job; there is one task per node."""

    job_id: str
    """As users write it: `17`, or `17_3` for a task of an array."""
    node: int
    """Number of this node in the job, from 0."""
    num_nodes: int
    restart: int
    """How often the job was requeued before."""
    node_name: str = ""

    @property
    def start_id(self) -> str:
        """Tells one start of the job from another."""
        return f"{self.job_id}.{self.restart}"


def read_environment(env: Mapping[str, str]) -> JobEnvironment:
    """The job this process is a task of.

    Raises:
        UsageError: it is none.
    """
    try:
        array, index = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
        return JobEnvironment(
            job_id=f"{array}_{index}" if array and index else env["SLURM_JOB_ID"],
            node=int(env.get("SLURM_NODEID", "0")),
            num_nodes=int(env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_JOB_NUM_NODES") or "1"),
            restart=int(env.get("SLURM_RESTART_COUNT", "0")),
            node_name=env.get("SLURMD_NODENAME", ""),
        )
    except (KeyError, ValueError) as error:
        raise UsageError(f"not a task of a Slurm job, missing or odd: {error}") from error


def port_of_job(job_id: str) -> int:
    """A port that jobs on one node hardly share, below those the kernel hands out; used if it is free."""
    number, _, index = job_id.partition("_")
    return 10000 + (int(number) * 17 + int(index or 0)) % 20000
