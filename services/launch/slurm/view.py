"""What runs, as Slurm, its jobs and the gateway have it, and what ended although nobody asked it to."""

from __future__ import annotations

import os
import shlex
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from rollout.account import now_at
from rollout.client import Client, RolloutError
from services.launch import paths
from services.launch.parts import STAGES
from services.launch.slurm import scheduler
from services.launch.slurm.plan import ALLOCATION, HEAD, NODE
from services.launch.slurm.rundir import DOWN, STARTING, UP, Head, Member, RunDir, Submitted
from services.launch.slurm.scheduler import Job
from services.launch.supervisor import ended, part_log, tail

LAST_LINES = 15
"""Of a log that are shown: most of a traceback."""
_IN_ORDER = ("COMPLETED", "CANCELLED")
_HOW = {
    "COMPLETED": "ended in order",
    "COMPLETING": "still ends",
    "CANCELLED": "was cancelled",
    "TIMEOUT": "ran into its time limit",
    "NODE_FAIL": "lost its node",
    "OUT_OF_MEMORY": "ran out of memory",
    "PREEMPTED": "was preempted",
}
_REASONS = {
    "Resources": "until nodes are free",
    "Priority": "others come first",
    "Dependency": "an earlier head still ends",
    "BeginTime": "Slurm's pause before a requeued job",
    "PartitionConfig": "the partition does not have so many nodes",
    "PartitionNodeLimit": "the partition does not give so many nodes to one job",
    "PartitionTimeLimit": "--time is above the partition's limit",
    "JobHeldUser": "held; `scontrol release` it",
    "JobHeldAdmin": "held by the operators",
    "launch failed requeued held": "it could not be started and is held; see its log",
}
"""Of Slurm's words those that say little by themselves."""


@dataclass
class JobView:
    """A job of the service, or a step of one, and what it says of itself."""

    job: Job
    role: str
    stages: list[str]
    member: Member | None = None
    step: bool = False
    """Part of a job that carries the whole service: it ends alone, its job goes on."""
    attached: bool = False
    """The job is an allocation of the user's own, which is not ours to end."""

    @property
    def name(self) -> str:
        """Tells it from all others."""
        return f"{self.job.id}/{self.member.name if self.member else self.role}" if self.step else self.job.id

    @property
    def shown(self) -> str:
        """For people: the node as Slurm names it."""
        return self.member.node if self.member else self.name

    @property
    def names(self) -> set[str]:
        """What a user may call it."""
        names = set() if self.step else {self.job.nodes, self.job.id, self.job.raw_id}
        return names | {self.member.name, self.member.node} if self.member else names

    def ends(self, run: RunDir) -> bool:
        """Whether it was asked to end, or does so."""
        return self.member is not None and (
            self.member.state != UP or run.asked_to_drain(self.member.name) is not None
        )


@dataclass(frozen=True)
class Failure:
    """What of the service ended although nobody asked it to, or ends again and again."""

    what: str
    """`node job 12_3`; `node-12-n1` for a step; `run fleet of node job 12` for a program of a job."""
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


@dataclass
class Status:
    """What `rollout slurm status` shows."""

    run_dir: str
    head: Head | None
    head_job: Job | None
    jobs: list[JobView]
    """All but the head."""
    service: dict[str, Any] | None = None
    """`/v1/status` of the gateway; None = it does not answer, `trouble` says why."""
    trouble: str = ""
    lost: list[str] = field(default_factory=list)
    """Nodes whose job did not end in order."""
    drained: list[str] = field(default_factory=list)
    """What became of the rollouts of each node that was drained, the latest last."""
    failures: list[Failure] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    """Roles of which something was submitted and nothing waits or runs."""
    advice: str = ""
    """What is missing, and in the last line the command that mends it; "" = nothing."""


class Look(NamedTuple):
    """What Slurm knows at one time of what was submitted."""

    submitted: dict[str, Submitted]
    jobs: list[Job]
    """Those that have ended too, while Slurm remembers them."""
    views: list[JobView]
    """What waits, runs or still ends."""

    def record_of(self, job: Job) -> Submitted:
        return self.submitted.get(job.base_id) or self.submitted[job.het_id]


def look(run: RunDir) -> Look:
    """Ask Slurm; SlurmError if it does not answer."""
    submitted = {record.id: record for record in run.submitted()}
    views: list[JobView] = []
    seen = Look(submitted, scheduler.jobs(submitted), views)
    members = run.members()
    for job in (job for job in seen.jobs if not job.ended):
        record = seen.record_of(job)
        own = [member for member in members if member.job == job.raw_id]
        if record.role != ALLOCATION:
            member = next((member for member in own if member.node == job.nodes), None)
            views.append(JobView(job, record.role, record.stages, member))
        elif job.leads:  # its head as long as that lives, and its members
            head = run.head()
            # An allocation of the user's own goes on without us.
            if not (record.attached and head and head.job == job.raw_id and head.state == DOWN):
                views.append(JobView(job, HEAD, [], None, True, record.attached))
            if not job.pending:
                views += [
                    JobView(job, member.role, member.stages, member, True, record.attached) for member in own
                ]
    return seen


def status_of(run: RunDir) -> Status:
    """What runs, as Slurm, the members and the gateway have it; SlurmError if Slurm does not answer."""
    seen = look(run)
    head_job = next((view.job for view in seen.views if view.role == HEAD and view.job.active), None)
    head = run.head()
    living = {view.member.name for view in seen.views if view.member}
    status = Status(
        str(run.path),
        head,
        head_job,
        [view for view in seen.views if view.role != HEAD],
        lost=[f"{member.node} (job {member.job})" for member in run.members() if member.name not in living],
        drained=[*run.drained().values()],
        failures=_failures(run, seen),
        gone=_gone(run, seen),
    )
    if head is not None and head.state == UP and head_job is not None and head.job == head_job.raw_id:
        try:
            with Client(head.url, api_key=run.api_key(), timeout=10.0, retry_for=0.0) as client:
                status.service = client.status()
        except RolloutError as error:
            status.trouble = str(error)
    status.advice = _advice(run, status, seen)
    return status


def command(run: RunDir, words: str) -> str:
    """A command of `rollout slurm` as it is to be typed for this run directory."""
    usual = Path(os.environ.get("ROLLOUT_SLURM_RUN") or paths.home() / "slurm-run").absolute()
    where = "" if usual == run.path else f" --run-dir {shlex.quote(str(run.path))}"
    return f"    rollout slurm {words}{where}"


def headless(run: RunDir, seen: Look) -> str:
    """Of a service whose nodes have no head: how it ended, when, and last the command that brings it back;
    "" = it has one, or nothing runs."""
    roles = {view.role for view in seen.views if view.job.active and (view.role == HEAD or not view.step)}
    if not roles or HEAD in roles:
        return ""
    how, heard = "Slurm has forgotten its job", "it never came up"
    if heads := [job for job in seen.jobs if seen.record_of(job).role in (HEAD, ALLOCATION)]:
        job = max(heads, key=lambda job: int(job.raw_id))
        how = f"job {job.id} {_HOW.get(job.state, job.state.lower())} on {job.nodes or 'no node'}"
    if (file := run.path / "head.json").exists():
        at = file.stat().st_mtime
        ago = timedelta(seconds=max(0, round(now_at(run.path) - at)))
        heard = f"last heard of at {time.strftime('%X', time.localtime(at))}, {ago} ago"
    nodes = sorted(view.shown for view in seen.views if view.role != HEAD and view.job.running)
    pending = sum(view.job.pending for view in seen.views)
    waiting = f"; {pending} jobs wait" if pending else ""
    return (
        f"The head is gone: {how}, {heard}.\n"
        f"Up without it: {', '.join(nodes) or 'nothing'}{waiting}. They keep their rollouts and wait.\n"
        "This command starts a new head with the same data; the nodes connect to it by themselves:\n"
        f"{command(run, 'up')}"
    )


def _advice(run: RunDir, status: Status, seen: Look) -> str:
    if status.head_job is None:
        what = "All of it still ends, which `up` waits for." if seen.views else "Nothing runs."
        return headless(run, seen) or f"{what}\n{command(run, 'up')}"
    if status.trouble:
        remedy = f"sinfo -n {status.head_job.nodes}; tail {run.logs}/{HEAD}-{status.head_job.raw_id}/*.log"
        return f"Its node may be lost, which Slurm notices later.\n    {remedy}"
    if status.service and not any(view.role == NODE for view in status.jobs):
        return f"No node carries rollouts.\n{command(run, 'scale --nodes N')}"
    if status.service and not status.service["backends"]:
        return "No LLM backend: rollouts that need a model wait.\n    rollout backends add URL"
    return ""


def _failures(run: RunDir, seen: Look) -> list[Failure]:
    """Jobs that ended otherwise than in order while Slurm remembers them, steps, and programs of jobs that
    keep ending."""
    failures = []
    for job in seen.jobs:
        if job.ended and job.leads and job.state not in _IN_ORDER:
            role = seen.record_of(job).role
            how, log = _HOW.get(job.state, job.state.lower()), run.logs / f"{role}-{job.raw_id}.log"
            failures.append(Failure(f"{role} job {job.id}", role, job.nodes, how, str(log), job.id))
    for step in (step for job in seen.submitted for step in run.steps(job) if step.status):
        how = f"failed ({ended(step.status)})"
        failures.append(Failure(step.name, step.role, step.node, how, str(step.log)))
    for member in (view.member for view in seen.views if view.member):
        for part, how in member.failing.items():
            what = f"{part} of {member.role} job {member.job}"
            log = part_log(run.logs / member.name, part)
            failures.append(Failure(what, member.role, member.node, f"keeps ending ({how})", str(log)))
    return failures


def _gone(run: RunDir, seen: Look) -> list[str]:
    expected = {record.role for record in seen.submitted.values()}
    living = {view.role for view in seen.views if not view.step}
    if ALLOCATION in expected:
        steps = [step for job in seen.submitted for step in run.steps(job)]
        expected = expected - {ALLOCATION} | {HEAD, *(step.role for step in steps)}
        if any(view.step for view in seen.views):
            # Its script notes its steps when it begins.
            living |= {step.role for step in steps if step.status is None} if steps else {HEAD}
    return sorted(expected - living)


def missing(run: RunDir, status: Status, nodes: int) -> str:
    """What is still to come before rollouts can be worked on by so many nodes; "" = nothing."""
    job, head = status.head_job, status.head
    if job is None:
        return "the head's job is not in Slurm's queue"
    if job.pending:
        return f"the head's job waits in the queue: {_reason(job)}"
    if head is None or head.job != job.raw_id or head.state not in (UP, STARTING):
        return f"the head starts on {job.nodes}; its log: {run.logs}/head-{job.raw_id}.log"
    if head.state == STARTING:
        return f"Redis is up on {head.node}, the gateway starts"
    if status.service is None:
        return f"the gateway at {head.url} does not answer: {status.trouble}"
    carriers = [view for view in status.jobs if view.role == NODE]
    ready = [view for view in carriers if _is_ready(view, status.service)]
    if len(ready) < nodes:
        waiting = sorted({_reason(view.job) for view in carriers if view.job.pending})
        text = f"{len(ready)} of {nodes} nodes are ready"
        return f"{text}, waiting: {', '.join(waiting)}" if waiting else text
    absent = [stage for stage in STAGES if nodes and not status.service["workers"][stage]]
    return f"no worker of {', '.join(absent)} yet" if absent else ""


def _reason(job: Job) -> str:
    if job.reason in ("None", ""):
        return "not looked at yet"
    limit = job.reason.startswith(("QOS", "Assoc", "MaxJobs")) and "a limit of your account or QOS"
    more = _REASONS.get(job.reason) or limit
    return f"{job.reason}, {more}" if more else job.reason


def _is_ready(view: JobView, service: dict[str, Any]) -> bool:
    """Whether every worker of a node has announced itself."""
    name = view.member.name if view.member else ""
    return bool(name) and all(f"{stage}@{name}" in service["workers"].get(stage, []) for stage in view.stages)
