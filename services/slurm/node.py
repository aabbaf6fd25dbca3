"""A node that carries rollouts: workers of some stages and, through them, the sandbox host."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import redis
import structlog
from kombu.exceptions import OperationalError

from services.dispatch import Dispatcher
from services.local import paths, plan
from services.local.redis import ping
from services.queues import EVAL, INIT, RUN, Ref, make_celery, queue_for
from services.settings import Settings
from services.slurm import place as places
from services.slurm.place import Place, Scratch
from services.slurm.rundir import DOWN, DRAINING, UP, Head, Member, RunDir
from services.slurm.supervisor import LOOK_S, Interrupted, Supervisor
from services.state.fleet import FleetStore
from services.state.redis import connect
from services.state.rollouts import RolloutStore

log = structlog.get_logger("slurm")

DRAIN_S = 75.0
"""For rollouts to end when the time limit is near: of the 120 s that `#SBATCH --signal` gives."""
HAND_BACK_S = 15.0
"""Beyond its own grace, for a worker to hand back and end."""
FAST_S = 20.0
"""For all workers to end once TERM came: Slurm kills after KillWait (30 s)."""
MOVE_S = 5.0
"""For workers to end whose Redis is gone: they have nobody to hand back to."""
ANSWER_S = 10.0
"""For the workers of a busy node to say what they do; on an idle one it takes milliseconds."""
IDLE_LOOKS = 2
"""Between two lists a message is in none, so a node is idle when it was so in a row."""
CHECK_S = 600.0
"""For the first sandbox: the image is unpacked."""


class NodeJob:
    """A node job's life."""

    def __init__(self, run: RunDir, place: Place, stages: list[str]) -> None:
        self.run_dir = run
        self.place = place
        self.stages = stages
        self.supervisor = Supervisor(run.logs / place.name)
        self.member = Member(place.name, "node", place.job, place.node, UP, stages)
        self.member.slots = {stage: _slots(stage) for stage in stages}
        self._drained = False
        """Whether the node was seen without any rollout."""
        self._url = ""
        self._env: dict[str, str] = {}

    def run(self) -> int:
        """Work until a signal or `rollout slurm drain` says to end; the exit status of the job."""
        self.supervisor.listen()
        root = Path(os.environ.get("ROLLOUT_SLURM_SCRATCH") or "/tmp")
        scratch = Scratch(root, self.run_dir.service, self.place.job)
        renews = False
        try:
            if not self.place.step:
                self.run_dir.forget_earlier_life(self.place.job)
            for name in scratch.sweep():
                log.info("swept what an earlier job left", directory=name)
            head = self.wait_for_head()
            self._env = self._environment(root, scratch.path)
            self._start_workers(self.run_dir.redis_url(head))
            self.run_dir.write_member(self.member)
            if INIT in self.stages:
                threading.Thread(target=self._check_sandbox, name="sandbox check", daemon=True).start()
            asked = self._serve()
            renews = asked is None and not self.supervisor.ends_now
            self._drain(asked)
        except Interrupted:
            pass
        finally:
            self._end(scratch)
        if renews:
            self.place.requeue_if_wanted()
        return 0

    # -- life --------------------------------------------------------------------------------

    def wait_for_head(self) -> Head:
        """Wait, for as long as the job lasts, until the head answers.

        Raises:
            Interrupted: The job is to end.
        """
        said = ""
        while self.supervisor.signal is None:
            head = self.run_dir.head()
            reason = "it has not started yet" if head is None else f"it is {head.state}"
            if head is not None and head.state != DOWN:
                reason = ping(self.run_dir.redis_url(head)) or ""
                if not reason:
                    return head
            if reason != said:
                log.info("waiting for the head", reason=reason)
                said = reason
            self.supervisor.wake.wait(LOOK_S)
        raise Interrupted

    def _environment(self, root: Path, sandboxes: Path) -> dict[str, str]:
        env = places.clean(os.environ)
        for name in ("ROLLOUT_URL", "ROLLOUT_API_KEY"):
            env.pop(name, None)
        env["PYTHONUNBUFFERED"] = "1"
        env["ROLLOUT_NODE"] = self.place.name
        env["ROLLOUT_SANDBOX_DIR"] = str(sandboxes)
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(sandboxes / "torchinductor"))
        if root != Path("/tmp"):
            # Unpacked images stay from job to job.
            env.setdefault("ROLLOUT_IMAGE_CACHE", str(root / f"rollout-images-{os.getuid()}"))
        return env

    def _start_workers(self, url: str) -> None:
        self._url = url
        for stage in self.stages:
            part = plan.fleet(stage, self.member.slots[stage], self.place.name)
            self.supervisor.start(part, self._env | {"ROLLOUT_REDIS_URL": url})

    def _check_sandbox(self) -> None:
        """Start a sandbox and end it: says what works here, and unpacks the image before the first
        rollout."""
        settings = Settings.from_env(self._env)
        try:
            done = subprocess.run(
                plan.sandbox_check(settings, None).command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                env=self._env,
                cwd=paths.REPO,
                timeout=CHECK_S,
            )
            self.member.sandbox = (done.stdout + done.stderr).strip()
            works = done.returncode == 0
        except subprocess.TimeoutExpired:
            self.member.sandbox, works = f"none has started within {CHECK_S:.0f} s", False
        if works:
            log.info("sandboxes work", sandbox=self.member.sandbox)
        else:
            self.member.sandbox = f"NO SANDBOX WORKS: {self.member.sandbox}"
            log.error(self.member.sandbox)
        if self.supervisor.signal is None:
            self.run_dir.write_member(self.member)

    def _serve(self) -> float | None:
        """Until the end is near. Seconds of grace if somebody asked for it, None for the time limit."""
        while True:
            self.supervisor.note_end(self.place.step and self.run_dir.job_ends(self.place.job))
            asked = self.run_dir.asked_to_drain(self.place.name)
            if asked is not None or self.supervisor.signal is not None:
                return asked
            self.supervisor.look()
            head = self.run_dir.head()
            if head is not None and head.state != DOWN and self.run_dir.redis_url(head) != self._url:
                self._follow(head)
            self.supervisor.wake.wait(LOOK_S)

    def _follow(self, head: Head) -> None:
        """The head came back elsewhere. Rollouts in hand are taken from their workers when their leases run
        out."""
        if ping(self.run_dir.redis_url(head)) is None:
            log.warning("the head has moved: the workers start anew", node=head.node, address=head.address)
            self.supervisor.stop_all(MOVE_S)
            self._start_workers(self.run_dir.redis_url(head))

    # -- end ---------------------------------------------------------------------------------

    def _drain(self, asked: float | None) -> None:
        """Take nothing new, then let the rollouts of this node end, for as long as there is time."""
        if self.supervisor.ends_now:
            return
        grace_s = float(os.environ.get("ROLLOUT_SLURM_DRAIN_S") or DRAIN_S) if asked is None else asked
        log.info("draining", grace_s=grace_s)
        self.member.state = DRAINING
        self.run_dir.write_member(self.member)
        deadline = time.monotonic() + grace_s
        # What INIT has in hand goes on to this node's own queues, or back.
        self.supervisor.stop(
            [f"{INIT} fleet"], min(grace_s, Settings.from_env(self._env).shutdown_grace_s) + HAND_BACK_S
        )
        idle = 0
        while idle < IDLE_LOOKS and time.monotonic() < deadline and not self.supervisor.ends_now:
            try:
                self._take_only_own()
                idle = idle + 1 if self._is_idle() else 0
            except (redis.RedisError, OperationalError, OSError) as error:
                log.warning("Redis does not answer; the drain goes on", error=str(error))
            self.supervisor.look()
            time.sleep(LOOK_S)
        self._drained = idle >= IDLE_LOOKS
        log.info("drained" if self._drained else "time is up: what is left is handed back")

    def _take_only_own(self) -> None:
        """Have RUN and EVAL serve only those whose sandboxes are here. Again and again: a worker may start
        anew."""
        app = make_celery(self._settings())
        try:
            for stage in (RUN, EVAL):
                if stage in self.stages:
                    app.control.cancel_consumer(stage, destination=[f"{stage}@{self.place.name}"])
        finally:
            app.close()

    def _is_idle(self) -> bool:
        """Whether no rollout of this node is in a worker's hands or waits for one."""
        settings = self._settings()
        names = [f"{stage}@{self.place.name}" for stage in (RUN, EVAL) if stage in self.stages]
        app = make_celery(settings)
        try:
            # With a limit it returns when all have answered; without, always after the whole time.
            asked = app.control.inspect(destination=names, timeout=ANSWER_S, limit=len(names))
            said = asked.active() or {} if names else {}
        finally:
            app.close()
        if set(said) != set(names) or any(said.values()):
            return False
        with connect(settings.redis_url, max_connections=2) as client:
            waiting = sum(client.llen(queue_for(stage, self.place.name)) for stage in (RUN, EVAL))
            return waiting + RolloutStore(client, settings).ahead(self.place.name)[0] == 0

    def _settings(self) -> Settings:
        return Settings.from_env(self._env | {"ROLLOUT_REDIS_URL": self._url})

    def _end(self, scratch: Scratch) -> None:
        """End what is left, give back what waits for this node, leave nothing on it."""
        if self.supervisor.children:
            if not (self._drained or self.supervisor.ends_now):
                # RUN first: what it finishes meanwhile is scored here.
                own_grace_s = Settings.from_env(self._env).shutdown_grace_s
                self.supervisor.stop([f"{RUN} fleet"], own_grace_s + HAND_BACK_S)
            self.supervisor.stop_all(FAST_S)
            self._vacate()
        scratch.remove()
        self.run_dir.forget_member(self.place.name)
        log.info("the node has ended in order")

    def _vacate(self) -> None:
        """Rollouts that wait for this node's workers begin anew on others; the reaper would see to it
        later."""
        settings = self._settings()
        try:
            with connect(settings.redis_url, max_connections=2, retries=0) as client:
                store = RolloutStore(client, settings)
                refs = [
                    Ref(id=one.rollout_id, attempt=one.attempt, node=None)
                    for one in store.vacate([self.place.name], lost=False)
                    if one.action == "restart"
                ]
                FleetStore(client).forget_nodes([self.place.name])
                app = make_celery(settings)
                try:
                    Dispatcher(app, store).send(INIT, refs)
                finally:
                    app.close()
        except (redis.RedisError, OSError) as error:
            log.warning("Redis does not answer; the reaper hands back what waits here", error=str(error))
            return
        if refs:
            log.info("handed back what waited here", count=len(refs))


def _slots(stage: str) -> int:
    text = os.environ.get(f"ROLLOUT_SLURM_SLOTS_{stage.upper()}")
    default = {INIT: plan.INIT_SLOTS, RUN: 64, EVAL: plan.EVAL_SLOTS}[stage]
    return int(text) if text else default
