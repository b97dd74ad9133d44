"""The run folder: every path in it has one name, here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run's files. Building one touches nothing; `make` creates the folders."""

    root: Path

    @property
    def profile(self) -> Path:
        """The resolved profile, every default written out."""
        return self.root / "profile.yaml"

    @property
    def plan(self) -> Path:
        """Topology, task counts and memory, as planned."""
        return self.root / "plan.json"

    @property
    def command(self) -> Path:
        """Command lines that started or resumed the run, one a line."""
        return self.root / "command.txt"

    @property
    def git(self) -> Path:
        """Revision of the program's checkout, `unknown` outside one."""
        return self.root / "git.txt"

    @property
    def metrics(self) -> Path:
        """One JSON row per step, written by rank 0."""
        return self.root / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """One JSON row per evaluation on the held-out split, written by rank 0."""
        return self.root / "evaluations.jsonl"

    @property
    def bench(self) -> Path:
        """Present only in a benchmark's folder: what to compare."""
        return self.root / "bench.json"

    @property
    def bench_result(self) -> Path:
        """What a benchmark measured."""
        return self.root / "bench_result.json"

    @property
    def measure(self) -> Path:
        """Present only in the folder of a memory measurement."""
        return self.root / "measure.json"

    def bench_apart(self, name: str) -> Path:
        """Run folder of a part of a benchmark that needs engines of its own."""
        return self.root / name

    @property
    def events_dir(self) -> Path:
        """Spans of every task, one file per rank."""
        return self.root / "events"

    @property
    def status_dir(self) -> Path:
        """What each process says about itself."""
        return self.root / "status"

    @property
    def logs_dir(self) -> Path:
        """Output of every process."""
        return self.root / "logs"

    @property
    def base_dir(self) -> Path:
        """The checkpoint RL starts from, in Hugging Face form."""
        return self.root / "base"

    @property
    def data_dir(self) -> Path:
        """The task's data."""
        return self.root / "data"

    @property
    def checkpoints_dir(self) -> Path:
        """Checkpoints; a run with one continues from the newest."""
        return self.root / "checkpoints"

    @property
    def rollouts_dir(self) -> Path:
        """Prompts, responses and reward parts."""
        return self.root / "rollouts"

    @property
    def report_dir(self) -> Path:
        """Pictures and tables."""
        return self.root / "report"

    @property
    def prepare_status(self) -> Path:
        """Progress of the preparation before the first step."""
        return self.status_dir / "prepare.json"

    @property
    def launcher_log(self) -> Path:
        """Output of torchrun, and of a rank until it opened its own log."""
        return self.logs_dir / "torchrun.log"

    @property
    def launch_status(self) -> Path:
        """Who runs the run, where, since when, and the reason it ended with."""
        return self.status_dir / "launch.json"

    @property
    def cancelled(self) -> Path:
        """Present once the user cancelled the run: it is not queued again."""
        return self.status_dir / "cancelled.json"

    @property
    def job(self) -> Path:
        """Present for a run submitted to a scheduler: the job's id and settings."""
        return self.root / "job.json"

    @property
    def job_script(self) -> Path:
        """The script that was submitted."""
        return self.root / "job.sh"

    @property
    def job_log(self) -> Path:
        """Output of that script."""
        return self.logs_dir / "slurm.log"

    @property
    def code_dir(self) -> Path:
        """Copy of the program and the task's folder, made when the run was submitted; it is what runs."""
        return self.root / "code"

    @property
    def prepare_log(self) -> Path:
        """Output of the preparation."""
        return self.logs_dir / "prepare.log"

    def node_log(self, node: int) -> Path:
        """Output of a node's torchrun; `launcher_log` is that of node 0."""
        return self.launcher_log if node == 0 else self.logs_dir / f"torchrun-node{node}.log"

    def node_status(self, node: int) -> Path:
        """How a node's torchrun ended, in a job of several nodes."""
        return self.status_dir / f"node{node}.json"

    def events(self, rank: int) -> Path:
        """Spans of one rank."""
        return self.events_dir / f"rank{rank}.jsonl"

    def sharing(self, rank: int) -> Path:
        """What one rank measured of running decode and training at once."""
        return self.root / f"sharing{rank}.json"

    def status(self, rank: int) -> Path:
        """Status of one rank."""
        return self.status_dir / f"rank{rank}.json"

    def rank_log(self, rank: int) -> Path:
        """stdout and stderr of one rank."""
        return self.logs_dir / f"rank{rank}.log"

    def make(self) -> None:
        """Create the run folder and its subfolders where they are missing."""
        folders = (self.events_dir, self.status_dir, self.logs_dir, self.data_dir, self.checkpoints_dir)
        for folder in (self.root, *folders, self.rollouts_dir, self.report_dir):
            folder.mkdir(parents=True, exist_ok=True)
