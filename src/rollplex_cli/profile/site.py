"""The site: every setting that belongs to a cluster and not to a method. Validated and frozen like the profile.

Field documentation is the string under the field. The files are in jobs/sites.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from rollplex_cli.profile.types import STRICT, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True, config=STRICT)
class NodeSite:
    """What one node offers. A key left out is not checked and not asked for."""

    cpus: PositiveInt | None = None
    """CPUs of the one task per node."""
    gpus: NonNegativeInt = 0
    gpu_gib: PositiveFloat | None = None
    """Memory of each GPU."""
    host_gib: PositiveFloat | None = None
    """Memory of the node."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class SlurmSite:
    """Options of `sbatch`; absent ones are left to the cluster's defaults."""

    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    reservation: str | None = None
    gres: str | None = None
    """Replaces `--gpus-per-node`, which otherwise follows from the profile's ranks."""
    dependency: str | None = None
    mem: str | None = None
    time: str | None = None
    """Time limit of one start of the job, as Slurm writes it (`minutes`, `hours:minutes:seconds`,
    `days-hours:minutes:seconds`); a run longer than it continues in the next start."""
    exclusive: bool = True
    """Whole nodes."""
    stop_lead_s: Annotated[int, Field(ge=1, le=65535)] = 300
    """How long before the time limit the ranks are told to stop: must cover a step and a checkpoint."""
    max_requeues: NonNegativeInt = 3
    """How often a job that was preempted, reached its time limit or lost a rank is queued again."""
    array_parallelism: PositiveInt = 8
    """Runs of an array that are active at a time."""
    sbatch: dict[str, str | int | bool] = Field(default_factory=dict)
    """Any further option of `sbatch`, by its long name; `true` gives an option without a value."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Site:
    """A cluster."""

    name: str
    description: str = ""
    node: NodeSite = Field(default_factory=NodeSite)
    slurm: SlurmSite = Field(default_factory=SlurmSite)
    setup: tuple[str, ...] = ()
    """Lines of shell before the run starts: modules, conda."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Variables written into the script. Never a secret: names that look like one are refused."""
    pass_environment: tuple[str, ...] = ()
    """Names of variables that must be set where the job is submitted; their values are not written anywhere."""
    inherit_environment: bool = True
    """Whether jobs get the submitting shell's whole environment, or only `pass_environment`."""
    srun: tuple[str, ...] = ()
    """Further arguments of `srun`, such as those of a container plugin."""
    wrapper: tuple[str, ...] = ()
    """Words in front of `python` on the compute nodes, such as `apptainer exec IMAGE`."""
    python: str | None = None
    """The Python program on the compute nodes; the submitting one where it is absent."""
    runs_dir: str = "runs"
    """Folder of run folders; every node must see it."""
