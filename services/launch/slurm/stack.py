"""The service on Slurm as one thing: submit it, make it larger and smaller, end it."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from services.launch import SlurmError
from services.launch.parts import STAGES
from services.launch.slurm import plan, scheduler
from services.launch.slurm.plan import ALLOCATION, ENGINE, HEAD, NODE, Submission, UpOptions
from services.launch.slurm.rundir import DOWN, NO_SANDBOX, Head, RunDir, Submitted
from services.launch.slurm.site import Site
from services.launch.slurm.view import (
    LAST_LINES,
    Failure,
    JobView,
    Look,
    Status,
    headless,
    look,
    missing,
    status_of,
)
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
T = TypeVar("T")


class SlurmStack:
    """The service whose run directory is `path`. Its methods raise SlurmError with what went wrong."""

    def __init__(self, path: Path, say: Say = lambda text: None) -> None:
        self.run = RunDir(path)
        self.say = say
        self._reasons: set[str] = set()
        """Last lines of the logs that were shown."""
        self._told: set[str] = set()
        """Names of failures and members that were told of."""
        self._script: subprocess.Popen[bytes] | None = None
        """Of the allocation that we began steps in."""

    # -- up ----------------------------------------------------------------------------------

    def up(self, where: Site, options: UpOptions) -> int:
        """Submit everything, or begin it in the allocation we are in. The data of an earlier `up` is taken
        over. Where only the head is gone, it alone is submitted, as that `up` was asked.

        Returns:
            How many nodes must be there before rollouts can be worked on: 1, or 0 where none was asked for.
        """
        self._wait_ends()
        seen = look(self.run)
        if again := self.head_alone(seen, where, options):
            self.run.forget_member(HEAD)  # it may have been asked to end
            self._submit(again)
            return min(1, sum(view.role == NODE for view in seen.views))
        self.run.make()
        self.run.forget_life()
        self.run.renew_engine_key()
        self.run.write_private(self.run.environment, plan.environment(self.run, where, options))
        self.run.write_options(options.to_json(where))
        if options.form == plan.ATTACHED:
            self._attach(options)
            return min(1, options.nodes)
        try:
            for submission in plan.submissions(self.run, where, options):
                self._submit(submission)
        except SlurmError:
            # Half a service would wait for its other half.
            scheduler.cancel(job.id for job in self.run.submitted())
            self.run.write_submitted([])
            raise
        return min(1, options.nodes)

    def _wait_ends(self) -> None:
        """Until no head still ends, whose Redis may write, nor all of a service."""

        def ending() -> list[JobView]:
            views = look(self.run).views
            active = any(view.job.active for view in views)
            return [view for view in views if not view.job.active and (view.role == HEAD or not active)]

        if first := ending():
            self.say(f"waiting for what still ends: {_names(first)}")
        if late := _wait_while(ending, END_S):
            raise SlurmError(f"not ended yet: {_names(late)}; see `scontrol show job`, then ask again")

    def head_alone(self, seen: Look, where: Site, asked: UpOptions) -> Submission | None:
        """What `up` submits where only the head is gone; None where nothing runs. Options of sbatch that are
        given now win; what nodes read when they start stays as it is. SlurmError if there is a head."""
        if not any(view.job.active for view in seen.views):
            return None
        if not headless(self.run, seen):
            ids = ", ".join(sorted({view.job.base_id for view in seen.views}))
            raise SlurmError(
                f"a service runs already from {self.run.path} (jobs {ids}): "
                "`rollout slurm status` shows it, `scale` changes it, `down` ends it"
            )
        options, saved_site = self.saved()
        self.say("the head alone: its nodes join it as they are; `rollout slurm scale` changes their number")
        saved, usual = asdict(options), asdict(UpOptions(nodes=1))
        now = asdict(asked) | {"slots": options.slots | asked.slots, "given": {}}
        kept = [name.replace("_", " ") for name in now if now[name] not in (saved[name], usual[name])]
        if kept := kept + ["site file"] * (where != saved_site):
            self.say(f"not changed: {', '.join(kept)}; `rollout slurm down`, then `up` changes it")
        again = replace(options, given=options.given | asked.given)
        return plan.submission(self.run, saved_site, again, HEAD)

    def _submit(self, submission: Submission) -> None:
        record = replace(submission.record, id=scheduler.submit(submission.command))
        self.run.write_submitted([*self.run.submitted(), record])
        what = f"{record.role} job" if record.count == 1 else f"{record.count} {record.role} jobs"
        stages = f" ({', '.join(record.stages)})" if record.stages and record.stages != list(STAGES) else ""
        self.say(f"submitted {what}{stages}: {record.id}")

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

    def wait(self, timeout_s: float = math.inf, nodes: int = 1) -> Head:
        """Wait until the gateway answers and rollouts can be worked on.

        Args:
            nodes: How many nodes must be there.

        Raises:
            SlurmError: Nothing can come of it, for the head or all nodes have ended; or the time is over.
        """
        deadline = time.monotonic() + timeout_s
        last_lacking, looks_without = "", 0
        while True:
            status = status_of(self.run)
            self._tell_news(status)
            lacking = missing(self.run, status, nodes)
            if not lacking:
                assert status.head is not None
                return status.head
            over = [role for role in (HEAD, NODE) if role in status.gone and (nodes or role == HEAD)]
            looks_without = looks_without + 1 if over else 0
            if looks_without >= GONE_LOOKS:
                raise SlurmError(self._why_gone(over[0], status))
            if self._script is not None and self._script.poll() is not None:
                raise SlurmError(f"the steps in the allocation have ended. {self.last_words(ALLOCATION)}")
            if lacking != last_lacking:
                self.say(lacking)
                last_lacking = lacking
            if time.monotonic() > deadline:
                raise SlurmError(
                    f"not up after {timeout_s:.0f} s: {lacking}. "
                    "The jobs stay; `rollout slurm down` ends them"
                )
            time.sleep(POLL_S)

    def _tell_news(self, status: Status) -> None:
        """Say what failed since the last look."""
        self.tell([failure for failure in status.failures if failure.shown() not in self._told])
        self._told.update(failure.shown() for failure in status.failures)
        for member in (view.member for view in status.jobs if view.member):
            if member.sandbox.startswith(NO_SANDBOX) and member.name not in self._told:
                self.say(f"{member.node}: {member.sandbox}")
                self._told.add(member.name)

    def tell(self, failures: list[Failure]) -> None:
        """Say what failed: of a few the end of the log, the others in a line."""
        others = []
        for failure in failures:
            reason = failure.reason()
            if reason in self._reasons or len(self._reasons) >= MOST_TOLD:
                others.append(failure.shown())
            else:
                self._reasons.add(reason)
                self.say(failure.told())
        if others:
            self.say(f"and {len(others)} more: {'; '.join(others)}")

    def _why_gone(self, role: str, status: Status) -> str:
        which = "the head's job has" if role == HEAD else f"all {role} jobs have"
        advice = "; `rollout slurm down` ends the others" if status.head_job or status.jobs else ""
        if any(failure.role in (role, ALLOCATION) for failure in status.failures):
            return f"{which} ended, as said above{advice}"
        return f"{which} ended{advice}. {self.last_words(role)}"

    def last_words(self, role: str = HEAD) -> str:
        """The end of the latest log of a role."""
        logs = [path for name in (role, ALLOCATION) for path in self.run.logs.glob(f"{name}-*.log")]
        if not logs:
            ids = ",".join(job.id for job in self.run.submitted())
            return (
                f"It left no log in {self.run.logs}: do the nodes see that directory? "
                f"`scontrol show job {ids}` or `sacct -j {ids}` may tell more"
            )
        latest = max(logs, key=lambda path: path.stat().st_mtime)
        return f"The end of {latest}:\n{tail(latest, LAST_LINES)}"

    # -- scale -------------------------------------------------------------------------------

    def active(self, role: str, stages: list[str]) -> list[JobView]:
        """Jobs of a kind that wait or run and were not asked to end.

        Args:
            stages: Of nodes. Of engines their policy, or all stages for those of any policy.
        """
        every = role == ENGINE and stages == list(STAGES)
        # Engine jobs that were submitted without a policy are as `up` was asked.
        usual = [self.engine_policy()] if role == ENGINE and not every else []
        return [
            view
            for view in look(self.run).views
            if view.role == role
            and (every or (view.stages or usual) == stages)
            and view.job.active
            and not view.ends(self.run)
        ]

    def saved(self) -> tuple[UpOptions, Site]:
        """What `up` was asked for the service that runs."""
        saved = self.run.options()
        if saved is None:
            raise SlurmError(f"no service runs from {self.run.path}; `rollout slurm up` starts one")
        return UpOptions.from_json(saved)

    def engine_policy(self) -> str:
        """The policy of engines as `up` was asked for them; SlurmError if it was not."""
        if (engines := self.saved()[0].engines) is None:
            raise SlurmError("`up` was told of no engines: give --engine-nodes and --engine-model there")
        return engines.policy

    def scale(
        self,
        target: int,
        stages: list[str],
        role: str = NODE,
        grace_s: float = DRAIN_GRACE_S,
        held: Mapping[str, int] | None = None,
    ) -> int:
        """Have `target` jobs of a kind: submit more, or drop waiting ones and drain those with the least.

        Args:
            held: Member → rollouts in hand. Of equals, and where nobody knows, the newest is drained.

        Returns:
            The change.
        """
        if not 0 <= target <= plan.MOST_NODES:
            raise SlurmError(f"{target} is not between 0 and {plan.MOST_NODES}")
        seen = look(self.run)
        if words := headless(self.run, seen):
            # New nodes would wait for nobody, and drained ones have nobody to hand back to.
            raise SlurmError(words)
        active = self.active(role, stages)
        change = target - len(active)
        if change > 0:
            options, where = self.saved()
            if not seen.views:
                raise SlurmError(f"no service runs from {self.run.path}; `rollout slurm up` starts one")
            usual = role == ENGINE and stages == [self.engine_policy()]
            kind = STAGES if usual else tuple(stages)
            self._submit(plan.submission(self.run, where, options, role, change, kind))
        elif change < 0:

            def cost(view: JobView) -> tuple[bool, int, int]:  # nothing of one that waits
                busy = (held or {}).get(view.member.name, 0) if view.member else 0
                return not view.job.pending, busy, -int(view.job.raw_id)

            self._drain(sorted(active, key=cost)[:-change], grace_s)
        return change

    # -- drain -------------------------------------------------------------------------------

    def drain(self, names: Iterable[str], grace_s: float = DRAIN_GRACE_S, wait: bool = False) -> list[str]:
        """Have nodes end once their rollouts have; after `grace_s` seconds what is left is handed back.

        Args:
            names: Nodes as Slurm names them, or members (`n1-job12`), or ids of jobs.
            wait: Return only when they have ended.

        Returns:
            Those that were asked.
        """
        views = [view for view in look(self.run).views if view.role != HEAD]
        asked = set(names)
        if strangers := asked.difference(*(view.names for view in views)):
            known = ", ".join(sorted(view.shown for view in views)) or "none"
            raise SlurmError(f"no job of the service is on {min(strangers)!r}; there are: {known}")
        chosen = [view for view in views if view.names & asked]
        self._drain(chosen, grace_s)
        if wait and (late := self._wait_gone(chosen, grace_s + END_S)):
            raise SlurmError(f"not ended yet: {_names(late)}; see `rollout slurm status`")
        if wait:
            self._tell_drained(chosen)
        return [view.shown for view in chosen]

    def _drain(self, views: list[JobView], grace_s: float) -> None:
        # One that waits, or has just begun, has nothing to hand back, and nothing that would read the file.
        scheduler.cancel(view.job.id for view in views if view.member is None)
        for view in views:
            if view.member is not None:
                self.run.ask_to_drain(view.member.name, grace_s)
                self.say(f"draining {view.member.node} (job {view.job.id})")
        # Only to wake them: over a network file system the file itself may take a while to be seen.
        running = (view.job.id for view in views if view.member and view.job.running and not view.step)
        scheduler.cancel(running, "--batch", "--signal=USR1")

    def _tell_drained(self, views: list[JobView]) -> None:
        """What became of the rollouts of these nodes, of which one that was killed says nothing."""
        names = {view.member.name for view in views if view.member}
        for name, text in self.run.drained().items():
            if name in names:
                self.say(text)

    def _wait_gone(self, views: list[JobView], timeout_s: float) -> list[JobView]:
        """Wait until these have ended; those that have not in time."""
        names = {view.name for view in views}
        return _wait_while(lambda: [view for view in look(self.run).views if view.name in names], timeout_s)

    # -- down --------------------------------------------------------------------------------

    def down(self, *, delete_data: bool = False, grace_s: float = DOWN_GRACE_S) -> list[str]:
        """End every job: nodes hand back to Redis, then the head closes it. An allocation of the user's own
        stays.

        Args:
            delete_data: Also delete the run directory with Redis' data and the keys.

        Returns:
            What was ended.
        """
        views = look(self.run).views
        members = [view for view in views if view.role != HEAD]
        self._drain(members, grace_s)
        if late := self._wait_gone(members, grace_s + END_S):
            self.say(f"cancelling what has not ended: {_names(late)}")
            scheduler.cancel(view.job.id for view in late if not view.step)
        self._tell_drained(members)
        self._end_heads([view for view in views if view.role == HEAD])
        if late := self._wait_gone(views, END_S):
            raise SlurmError(f"{_names(late)} do not end; see `scontrol show job`")
        self.run.forget_life()
        if delete_data:
            self._delete()
        return [view.name for view in views]

    def _end_heads(self, heads: list[JobView]) -> None:
        if heads:
            # Not only for steps: a head near its time limit would queue again.
            self.run.ask_to_drain(HEAD, 0.0)
        scheduler.cancel(
            view.job.id for view in heads if not view.step or (view.job.pending and not view.attached)
        )
        if steps := [view for view in heads if view.step and not view.job.pending]:
            _wait_while(lambda: (head := self.run.head()) is not None and head.state != DOWN, END_S)
            # Its script ends with its last step, if nothing went wrong.
            scheduler.cancel(view.job.id for view in self._wait_gone(steps, END_S) if not view.attached)

    def _delete(self) -> None:
        options = self.run.options()
        data = options and options["up"].get("data_dir")
        shutil.rmtree(self.run.path, ignore_errors=True)
        if data:
            self.say(f"Redis' data is in {data}/rollout-redis-{self.run.service}, which is yours to delete")


def _wait_while(late: Callable[[], T], timeout_s: float) -> T:
    """Look again and again until nothing is late, or the time is over; what was seen last."""
    deadline = time.monotonic() + timeout_s
    while (seen := late()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return seen


def _names(views: list[JobView]) -> str:
    return ", ".join(view.name for view in views)
