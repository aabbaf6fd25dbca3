"""The service on Slurm as one thing: submit it, make it larger and smaller, end it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from services.launch import SlurmError
from services.launch.parts import STAGES
from services.launch.slurm import plan, scheduler
from services.launch.slurm.failures import LAST_LINES, Failure
from services.launch.slurm.plan import ALLOCATION, ENGINE, HEAD, NODE, Submission, UpOptions
from services.launch.slurm.rundir import DOWN, NO_SANDBOX, Head, RunDir, Submitted
from services.launch.slurm.site import Site
from services.launch.slurm.view import JobView, Status, job_views, missing, status_of
from services.launch.supervisor import tail

POLL_S = 1.0
DRAIN_GRACE_S = 600.0
"""For the rollouts of a drained node."""
DOWN_GRACE_S = 10.0
"""For those of all nodes when the service goes down; what is left is handed back, and goes on after the next
`up`."""
END_S = 90.0
"""For a job to end beyond its grace: workers hand back, sandboxes are ended, Slurm cleans up."""
GONE_LOOKS = 3
"""A job just submitted may not be listed yet."""
MOST_TOLD = 3
"""Failures of which the log is shown; none whose log ends as an earlier one: a hundred nodes fail alike."""
Say = Callable[[str], None]


class SlurmStack:
    """The service whose run directory is `path`. Its methods raise SlurmError with what went wrong."""

    def __init__(self, path: Path, say: Say = lambda text: None) -> None:
        self.run = RunDir(path)
        self.say = say
        self._reasons: set[str] = set()
        """Last lines of the logs that were shown."""
        self._script: subprocess.Popen[bytes] | None = None
        """Of the allocation that we began steps in."""

    # -- up ----------------------------------------------------------------------------------

    def up(self, where: Site, options: UpOptions) -> None:
        """Submit everything, or begin it in the allocation we are in. The data of an earlier `up` is taken
        over."""
        if found := job_views(self.run):
            ids = ", ".join(sorted({one.job.base_id for one in found}))
            raise SlurmError(
                f"a service runs already from {self.run.path} (jobs {ids}): "
                "`rollout slurm status` shows it, `scale` changes it, `down` ends it"
            )
        self.run.make()
        self._forget_members()
        self.run.write_private(self.run.environment, plan.environment(self.run, where, options))
        self.run.write_options(options.to_json(where))
        self.run.write_submitted([])
        if options.form == plan.ATTACHED:
            self._attach(options)
            return
        try:
            for one in plan.submissions(self.run, where, options):
                self._submit(one)
        except SlurmError:
            # Half a service would wait for its other half.
            scheduler.cancel(job.id for job in self.run.submitted())
            self.run.write_submitted([])
            raise

    def _forget_members(self) -> None:
        for member in self.run.members():
            self.run.forget_member(member.name)
        self.run.forget_member(HEAD)
        self.run.forget_steps()

    def _submit(self, one: Submission) -> str:
        job = scheduler.submit(one.command)
        record = Submitted(job, one.record.role, one.record.count, one.record.stages)
        self.run.write_submitted([*self.run.submitted(), record])
        what = f"{record.role} job" if record.count == 1 else f"{record.count} {record.role} jobs"
        stages = f" ({', '.join(record.stages)})" if record.stages and record.stages != list(STAGES) else ""
        self.say(f"submitted {what}{stages}: {job}")
        return job

    def _attach(self, options: UpOptions) -> None:
        """Begin every part as a step of the allocation that this shell is in."""
        job = os.environ.get("SLURM_JOB_ID")
        if not job:
            raise SlurmError("this is no allocation (SLURM_JOB_ID is not set): begin with salloc")
        if options.engines and "SLURM_JOB_NODELIST_HET_GROUP_1" not in os.environ:
            raise SlurmError(
                "engines go into the second component of a heterogeneous allocation, and this one has none: "
                "salloc --nodes=4 -p cpu : --nodes=1 -p gpu --gres=gpu:4"
            )
        with (self.run.logs / f"{ALLOCATION}-{job}.log").open("ab") as output:
            self._script = subprocess.Popen(
                ["bash", *plan.allocation_script(self.run)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.run.write_submitted([Submitted(job, ALLOCATION, attached=True)])
        self.say(f"begun in allocation {job}")

    def wait(self, timeout_s: float | None = None, nodes: int = 1) -> Head:
        """Wait until the gateway answers and rollouts can be worked on.

        Args:
            timeout_s: None = for as long as it takes; a queue may be long.
            nodes: How many nodes must be there.

        Raises:
            SlurmError: Nothing can come of it, for the head or all nodes have ended; or the time is over.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        said, missed = "", 0
        told: set[str] = set()
        while True:
            status = self.status()
            self._tell_news(status, told)
            lacking = missing(self.run, status, nodes)
            if not lacking:
                assert status.head is not None
                return status.head
            over = [role for role in (HEAD, NODE) if role in status.gone and (nodes or role == HEAD)]
            missed = missed + 1 if over else 0
            if missed >= GONE_LOOKS:
                raise SlurmError(self._why_gone(over[0], status))
            if self._script is not None and self._script.poll() is not None:
                raise SlurmError(f"the steps in the allocation have ended. {self.last_words(ALLOCATION)}")
            if lacking != said:
                self.say(lacking)
                said = lacking
            if deadline is not None and time.monotonic() > deadline:
                raise SlurmError(
                    f"not up after {timeout_s:.0f} s: {lacking}. "
                    "The jobs stay; `rollout slurm down` ends them"
                )
            time.sleep(POLL_S)

    def _tell_news(self, status: Status, told: set[str]) -> None:
        """Say what failed since the last look."""
        news = [one for one in status.failures if one.what not in told]
        self.tell(news)
        for member in (view.member for view in status.jobs if view.member):
            if member.sandbox.startswith(NO_SANDBOX) and member.name not in told:
                self.say(f"{member.name}: {member.sandbox}")
                told.add(member.name)
        told.update(one.what for one in news)

    def tell(self, failures: list[Failure]) -> None:
        """Say what failed: of a few the end of the log, the others in a line."""
        rest = []
        for one in failures:
            reason = one.reason()
            if reason in self._reasons or len(self._reasons) >= MOST_TOLD:
                rest.append(one)
            else:
                self._reasons.add(reason)
                self.say(one.told())
        if rest:
            self.say(f"and {len(rest)} more: {'; '.join(one.shown() for one in rest)}")

    def _why_gone(self, role: str, status: Status) -> str:
        which = "the head's job has" if role == HEAD else f"all {role} jobs have"
        advice = "; `rollout slurm down` ends the others" if status.head_job or status.jobs else ""
        if any(one.role in (role, ALLOCATION) for one in status.failures):
            return f"{which} ended, as said above{advice}"
        return f"{which} ended{advice}. {self.last_words(role)}"

    def last_words(self, role: str = HEAD) -> str:
        """The end of the latest log of a role."""
        found = [path for name in (role, ALLOCATION) for path in self.run.logs.glob(f"{name}-*.log")]
        if not found:
            ids = ",".join(job.id for job in self.run.submitted())
            return (
                f"It left no log in {self.run.logs}: do the nodes see that directory? "
                f"`scontrol show job {ids}` or `sacct -j {ids}` may tell more"
            )
        latest = max(found, key=lambda path: path.stat().st_mtime)
        return f"The end of {latest}:\n{tail(latest, LAST_LINES)}"

    def status(self) -> Status:
        """What runs, as Slurm, the members and the gateway have it."""
        return status_of(self.run)

    # -- scale -------------------------------------------------------------------------------

    def count(self, stages: Iterable[str] = STAGES, role: str = NODE) -> int:
        """Jobs of a kind that wait or run and were not asked to end."""
        return len(self.active(role, list(stages)))

    def active(self, role: str, stages: list[str]) -> list[JobView]:
        """Those jobs."""
        return [
            one
            for one in job_views(self.run)
            if one.role == role
            and (role != NODE or one.stages == stages)
            and one.job.active
            and not one.ends(self.run)
        ]

    def add(self, count: int, stages: Iterable[str] = STAGES, role: str = NODE) -> str:
        """Submit `count` further jobs; those of one stage serve rollouts without a sandbox only.

        Returns:
            The id of the job array.
        """
        saved = self.run.options()
        if saved is None or not job_views(self.run):
            raise SlurmError(f"no service runs from {self.run.path}; `rollout slurm up` starts one")
        options, where = UpOptions.from_json(saved)
        if role == ENGINE and options.engines is None:
            raise SlurmError("`up` was told of no engines: give --engine-nodes and --engine-model there")
        if not 1 <= count <= plan.MOST_NODES:
            raise SlurmError(f"{count} jobs is not between 1 and {plan.MOST_NODES}")
        return self._submit(plan.submission(self.run, where, options, role, count, tuple(stages)))

    def scale(
        self, target: int, stages: Iterable[str] = STAGES, role: str = NODE, grace_s: float = DRAIN_GRACE_S
    ) -> int:
        """Have `target` jobs of a kind: submit more, or drop waiting ones and drain the newest.

        Returns:
            The change.
        """
        if not 0 <= target <= plan.MOST_NODES:
            raise SlurmError(f"{target} is not between 0 and {plan.MOST_NODES}")
        chosen = list(stages)
        active = self.active(role, chosen)
        change = target - len(active)
        if change > 0:
            self.add(change, chosen, role)
        elif change < 0:
            # Waiting ones cost nothing to drop; of those that run, the newest have the least to lose.
            active.sort(key=lambda one: (not one.job.pending, -int(one.job.raw_id)))
            self._drain(active[:-change], grace_s)
        return change

    # -- drain -------------------------------------------------------------------------------

    def drain(self, names: Iterable[str], grace_s: float = DRAIN_GRACE_S, wait: bool = False) -> list[str]:
        """Have nodes end once their rollouts have; after `grace_s` seconds what is left is handed back.

        Args:
            names: Nodes as Slurm names them, or members (`n1-12`), or ids of jobs.
            wait: Return only when they have ended.

        Returns:
            Those that were asked.
        """
        views = [one for one in job_views(self.run) if one.role != HEAD]
        chosen: list[JobView] = []
        for name in names:
            found = [one for one in views if name in one.names]
            if not found:
                there = (
                    ", ".join(sorted(one.member.name if one.member else one.name for one in views)) or "none"
                )
                raise SlurmError(f"no job of the service is on {name!r}; there are: {there}")
            chosen += [one for one in found if one not in chosen]
        self._drain(chosen, grace_s)
        if wait and (left := self._wait_gone(chosen, grace_s + END_S)):
            raise SlurmError(
                f"not ended yet: {', '.join(one.name for one in left)}; see `rollout slurm status`"
            )
        return [one.shown for one in chosen]

    def _drain(self, views: list[JobView], grace_s: float) -> None:
        # One that waits, or has just begun, has nothing to hand back, and nothing that would read the file.
        scheduler.cancel(one.job.id for one in views if one.member is None)
        asked = [one for one in views if one.member is not None]
        for one in asked:
            assert one.member is not None
            self.run.ask_to_drain(one.member.name, grace_s)
            self.say(f"draining {one.member.name} (job {one.job.id})")
        # Only to wake them: over a network file system the file itself may take a while to be seen.
        scheduler.signal_script((one.job.id for one in asked if one.job.running and not one.step), "USR1")

    def _wait_gone(self, views: list[JobView], timeout_s: float) -> list[JobView]:
        """Wait until these have ended; those that have not in time."""
        names = {one.name for one in views}
        deadline = time.monotonic() + timeout_s
        while left := [one for one in job_views(self.run) if one.name in names]:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        return left

    # -- down --------------------------------------------------------------------------------

    def down(self, *, delete_data: bool = False, grace_s: float = DOWN_GRACE_S) -> list[str]:
        """End every job: nodes hand back to Redis, then the head closes it. An allocation of the user's own
        stays.

        Args:
            delete_data: Also delete the run directory with Redis' data and the keys.

        Returns:
            What was ended.
        """
        views = job_views(self.run)
        self._drain([one for one in views if one.role != HEAD], grace_s)
        others = [one for one in views if one.role != HEAD]
        if left := self._wait_gone(others, grace_s + END_S):
            self.say(f"cancelling what has not ended: {', '.join(one.name for one in left)}")
            scheduler.cancel(one.job.id for one in left if not one.step)
        self._end_heads([one for one in views if one.role == HEAD])
        if left := self._wait_gone(views, END_S):
            raise SlurmError(f"{', '.join(one.name for one in left)} do not end; see `scontrol show job`")
        self._forget_members()
        self.run.write_submitted([])
        if delete_data:
            self._delete()
        return [one.name for one in views]

    def _end_heads(self, heads: list[JobView]) -> None:
        if heads:
            # Not only for steps: a head near its time limit would queue again.
            self.run.ask_to_drain(HEAD, 0.0)
        scheduler.cancel(
            one.job.id for one in heads if not one.step or (one.job.pending and not one.attached)
        )
        steps = [one for one in heads if one.step and not one.job.pending]
        if not steps:
            return
        deadline = time.monotonic() + END_S
        while (head := self.run.head()) is not None and head.state != DOWN and time.monotonic() < deadline:
            time.sleep(POLL_S)
        # Its script ends with its last step, if nothing went wrong.
        scheduler.cancel(one.job.id for one in self._wait_gone(steps, END_S) if not one.attached)

    def _delete(self) -> None:
        options = self.run.options()
        data = options and options["up"].get("data_dir")
        shutil.rmtree(self.run.path, ignore_errors=True)
        if data:
            self.say(f"Redis' data is in {data}/rollout-redis-{self.run.service}, which is yours to delete")
