"""What of the service ended although nobody asked it to, or ends again and again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from services.launch.slurm import scheduler
from services.launch.slurm.plan import ALLOCATION
from services.launch.slurm.rundir import Member, RunDir, Submitted
from services.launch.slurm.scheduler import Job
from services.launch.supervisor import ended, part_log, tail

LAST_LINES = 15
"""Of a log that are shown: most of a traceback."""
_IN_ORDER = ("COMPLETED", "CANCELLED")
_HOW = {
    "TIMEOUT": "ran into its time limit",
    "NODE_FAIL": "lost its node",
    "OUT_OF_MEMORY": "ran out of memory",
    "PREEMPTED": "was preempted",
}


@dataclass(frozen=True)
class Failure:
    """One of them."""

    what: str
    """`node job 12_3`; `node-12-n1` for a step; `run fleet of n1-12` for a program of a job."""
    role: str
    node: str
    how: str
    log: str
    """Path of what it said."""
    job: str = ""
    """Of a job that has ended: its id as squeue shows it. The other one may stand for its whole array."""

    def shown(self) -> str:
        """In one line."""
        return f"{self.what} {self.how}" + (f" on {self.node}" if self.node else "")

    def reason(self) -> str:
        """What it said last: where many failures say the same, one is worth telling."""
        return tail(self.log, 1)

    def told(self) -> str:
        """With the exit status and the end of the log. Asks Slurm."""
        status = scheduler.exit_status(self.job) if self.job else None
        how = f" ({ended(status)})" if status else ""
        if not Path(self.log).exists():
            return f"{self.shown()}{how}. It left no log; do the nodes see {Path(self.log).parent}?"
        return f"{self.shown()}{how}. The end of {self.log}:\n{tail(self.log, LAST_LINES)}"


def of_jobs(run: RunDir, submitted: Mapping[str, Submitted], jobs: Iterable[Job]) -> list[Failure]:
    """Jobs that ended otherwise than in order or cancelled, while Slurm remembers them."""
    found = []
    for job in jobs:
        if job.ended and job.leads and job.state not in _IN_ORDER:
            role = (submitted.get(job.base_id) or submitted[job.het_id]).role
            log = run.logs / f"{role}-{job.raw_id}.log"
            how = _HOW.get(job.state, job.state.lower())
            found.append(Failure(f"{role} job {job.id}", role, job.nodes, how, str(log), job.id))
    return found


def of_steps(run: RunDir, submitted: Mapping[str, Submitted]) -> list[Failure]:
    """Steps of the job that carries the whole service."""
    return [
        Failure(step.name, step.role, step.node, f"failed ({ended(step.status)})", str(step.log))
        for one in submitted.values()
        if one.role == ALLOCATION
        for step in run.steps(one.id)
        if step.status
    ]


def of_members(run: RunDir, members: Iterable[Member]) -> list[Failure]:
    """Programs that the jobs start anew again and again."""
    return [
        Failure(
            f"{part} of {member.name}",
            member.role,
            member.node,
            f"keeps ending ({how})",
            str(part_log(run.logs / member.name, part)),
        )
        for member in members
        for part, how in member.failing.items()
    ]
