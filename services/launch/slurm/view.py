"""What runs: jobs as Slurm has them, members as they describe themselves, the service as the gateway sees
it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollout.client import Client, RolloutError
from services.launch.parts import STAGES
from services.launch.slurm import failures, scheduler
from services.launch.slurm.failures import Failure
from services.launch.slurm.plan import ALLOCATION, HEAD, NODE
from services.launch.slurm.rundir import DOWN, STARTING, UP, Head, Member, RunDir, Submitted
from services.launch.slurm.scheduler import Job


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
        """For people."""
        return self.member.name if self.member else self.name

    @property
    def names(self) -> set[str]:
        """What a user may call it."""
        found = set() if self.step else {self.job.nodes, self.job.id, self.job.raw_id}
        return found | {self.member.name, self.member.node} if self.member else found

    def ends(self, run: RunDir) -> bool:
        """Whether it was asked to end, or does so."""
        return self.member is not None and (
            self.member.state != UP or run.asked_to_drain(self.member.name) is not None
        )


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
    """Members that did not end in order."""
    failures: list[Failure] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)
    """What was submitted and has ended, however it did, while Slurm remembers it."""
    gone: list[str] = field(default_factory=list)
    """Roles of which something was submitted and nothing waits or runs."""


def job_views(run: RunDir) -> list[JobView]:
    """Everything of the service that waits or runs.

    Raises:
        SlurmError: Slurm does not answer.
    """
    submitted = {one.id: one for one in run.submitted()}
    return _views(run, submitted, scheduler.jobs(submitted))


def _views(run: RunDir, submitted: dict[str, Submitted], jobs: list[Job]) -> list[JobView]:
    members = run.members()
    found: list[JobView] = []
    for job in jobs:
        if job.ended:
            continue
        one = submitted.get(job.base_id) or submitted[job.het_id]
        if one.role != ALLOCATION:
            mine = [one for one in members if (one.job, one.node) == (job.raw_id, job.nodes)]
            found.append(JobView(job, one.role, one.stages, mine[0] if mine else None))
        elif job.leads:
            found += _steps(run, job, one, [member for member in members if member.job == job.raw_id])
    return found


def _steps(run: RunDir, job: Job, one: Submitted, members: list[Member]) -> list[JobView]:
    """A job that carries the whole service: its head as long as that lives, and its members."""
    head = run.head()
    ours = head is not None and head.job == job.raw_id
    # An allocation of the user's own goes on without us.
    lives = not one.attached or not ours or (head is not None and head.state != DOWN)
    first = [JobView(job, HEAD, [], None, True, one.attached)] if lives else []
    if job.pending:
        return first
    rest = [JobView(job, member.role, member.stages, member, True, one.attached) for member in members]
    return [*first, *rest]


def status_of(run: RunDir) -> Status:
    """What runs, as Slurm, the members and the gateway have it.

    Raises:
        SlurmError: Slurm does not answer.
    """
    submitted = {one.id: one for one in run.submitted()}
    jobs = scheduler.jobs(submitted)
    views = _views(run, submitted, jobs)
    head_job = next((view.job for view in views if view.role == HEAD), None)
    head = run.head()
    living = {view.member.name for view in views if view.member}
    status = Status(
        str(run.path),
        head,
        head_job,
        [view for view in views if view.role != HEAD],
        lost=[member.name for member in run.members() if member.name not in living],
        failures=failures.of_jobs(run, submitted, jobs)
        + failures.of_steps(run, submitted)
        + failures.of_members(run, [view.member for view in views if view.member]),
        ended=[job for job in jobs if job.ended],
        gone=_gone(run, submitted, views),
    )
    if head is not None and head.state == UP and head_job is not None and head.job == head_job.raw_id:
        try:
            with Client(head.url, api_key=run.api_key(), timeout=10.0, retry_for=0.0) as client:
                status.service = client.status()
        except RolloutError as error:
            status.trouble = str(error)
    return status


def _gone(run: RunDir, submitted: dict[str, Submitted], views: list[JobView]) -> list[str]:
    wanted = {one.role for one in submitted.values() if one.role != ALLOCATION}
    living = {view.role for view in views if not view.step}
    for one in submitted.values():
        if one.role == ALLOCATION:
            steps = run.steps(one.id)
            wanted |= {HEAD, *(step.role for step in steps)}
            if any(view.step for view in views):
                # Its script notes its steps when it begins.
                living |= {step.role for step in steps if step.status is None} if steps else {HEAD}
    return sorted(wanted - living)


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
        return f"{len(ready)} of {nodes} nodes are ready" + (
            f", waiting: {', '.join(waiting)}" if waiting else ""
        )
    absent = [stage for stage in STAGES if nodes and not status.service["workers"][stage]]
    return f"no worker of {', '.join(absent)} yet" if absent else ""


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


def _reason(job: Job) -> str:
    if job.reason in ("None", ""):
        return "not looked at yet"
    more = _REASONS.get(job.reason) or (
        "a limit of your account or QOS" if job.reason.startswith(("QOS", "Assoc", "MaxJobs")) else ""
    )
    return f"{job.reason}, {more}" if more else job.reason


def _is_ready(view: JobView, service: dict[str, Any]) -> bool:
    """Whether every worker of a node has announced itself."""
    name = view.member.name if view.member else ""
    return bool(name) and all(f"{stage}@{name}" in service["workers"].get(stage, []) for stage in view.stages)
