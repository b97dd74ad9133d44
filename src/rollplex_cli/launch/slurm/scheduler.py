"""What the scheduler says of a job, with and without an accounting database.

The controller (`squeue`, `scontrol`) knows pending and running jobs and, for some minutes, ended ones; `sacct` knows
all of them where there is a database. Everything here is a question: nothing changes a job.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rollplex_cli.launch.subprocess import run_text

WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
ACTIVE = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
FIELD = re.compile(r"(?:^|\s)([A-Za-z/:]+)=(\S*)")

REASONS = {
    "Priority": "other jobs have a higher priority",
    "Resources": "no nodes are free",
    "BeginTime": "it may start only at a later time; a job that was requeued waits some minutes",
    "Dependency": "it waits for another job",
    "ReqNodeNotAvail": "a node it needs is down or reserved",
    "PartitionTimeLimit": "its time limit is above that of the partition",
    "PartitionNodeLimit": "it wants more nodes than the partition allows",
    "QOSMaxJobsPerUserLimit": "you have as many jobs as the QOS allows",
    "JobHeldUser": "it is held; `scontrol release` lets it go",
    "JobHeldAdmin": "an administrator holds it",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job as the scheduler sees it."""

    job_id: str
    state: str
    """Slurm's word in full: `PENDING`, `RUNNING`, `TIMEOUT`, `NODE_FAIL`, `COMPLETED` ..."""
    reason: str = ""
    """Why it waits, in Slurm's word; empty where there is none."""
    exit_code: int | None = None
    signal: int | None = None
    nodes: str = ""
    restarts: int = 0
    start: str = ""
    """Start, or expected start of a job that waits; empty if unknown."""
    source: str = ""
    """Which program said so."""

    @property
    def is_waiting(self) -> bool:
        """It will run."""
        return self.state in WAITING

    @property
    def is_active(self) -> bool:
        """It runs, or is just being taken down."""
        return self.state in ACTIVE

    @property
    def reason_text(self) -> str:
        """Why it waits, in words where the reason is a common one."""
        word = self.reason.split(",")[0]
        return f"{self.reason}: {REASONS[word]}" if word in REASONS else self.reason


def job_state(job_id: str) -> JobState | None:
    """State of a job; None if no program knows it.

    A live job is the controller's to tell. Of an ended one the database tells more reliably, since the controller
    forgets it.
    """
    live = parse_scontrol(run_text(["scontrol", "--oneliner", "show", "job", job_id]) or "", job_id)
    if live is not None and (live.is_waiting or live.is_active):
        return live
    fields = "JobID,State,ExitCode,NodeList,Restarts,Start"
    text = run_text(["sacct", "-n", "-X", "-P", "-D", "-j", job_id, "-o", fields])
    return parse_sacct(text or "", job_id) or live


def parse_scontrol(text: str, job_id: str) -> JobState | None:
    """State from `scontrol --oneliner show job`; a job of an array has one line per task."""
    for line in text.splitlines():
        values = dict(FIELD.findall(line))
        names = {values.get("JobId"), f"{values.get('ArrayJobId')}_{values.get('ArrayTaskId')}"}
        if job_id not in names or "JobState" not in values:
            continue
        code, _, number = values.get("ExitCode", "").partition(":")
        start = values.get("StartTime", "")
        return JobState(
            job_id=job_id,
            state=values["JobState"].split("+")[0],
            reason="" if values.get("Reason") in (None, "None") else values["Reason"],
            exit_code=int(code) if code.isdigit() else None,
            signal=int(number) if number.isdigit() and int(number) else None,
            nodes="" if values.get("NodeList") in (None, "(null)") else values["NodeList"],
            restarts=int(values["Restarts"]) if values.get("Restarts", "").isdigit() else 0,
            start="" if start in ("Unknown", "N/A") else start,
            source="scontrol",
        )
    return None


def parse_sacct(text: str, job_id: str) -> JobState | None:
    """State from `sacct -n -X -P -D`: with every start of a requeued job on a line of its own, the last one counts."""
    rows = [line.split("|") for line in text.splitlines()]
    found = [row for row in rows if len(row) >= 4 and row[0] == job_id]
    if not found:
        return None
    row = found[-1]
    code, _, number = row[2].partition(":")
    return JobState(
        job_id=job_id,
        # `CANCELLED by 1000`
        state=row[1].split()[0].rstrip("+"),
        exit_code=int(code) if code.isdigit() else None,
        signal=int(number) if number.isdigit() and int(number) else None,
        nodes="" if row[3] in ("None assigned", "") else row[3],
        restarts=int(row[4]) if len(row) > 4 and row[4].isdigit() else len(found) - 1,
        start=row[5] if len(row) > 5 and row[5] != "Unknown" else "",
        source="sacct",
    )


def script_of_job(job_id: str) -> Path | None:
    """The script that a job was submitted as, where the controller still knows the job."""
    text = run_text(["scontrol", "--oneliner", "show", "job", job_id]) or ""
    found = re.search(r"\sCommand=(.+?)(?:\s+[A-Z][A-Za-z]*=|$)", text, re.MULTILINE)
    return Path(found.group(1)) if found else None
