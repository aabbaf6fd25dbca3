"""A node that carries rollouts: workers of some stages and, through them, the sandbox host."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import redis
import structlog
from celery import Celery
from kombu.exceptions import OperationalError

from rollout.schema import State
from services.handback import hand_back
from services.launch import parts
from services.launch.redis import ping
from services.launch.slurm.job import MemberJob
from services.launch.slurm.place import Place
from services.launch.slurm.plan import NODE
from services.launch.slurm.rundir import DOWN, DRAINING, NO_SANDBOX, Head, RunDir
from services.launch.supervisor import LOOK_S, Interrupted, Part, ended
from services.queues import EVAL, INIT, RUN, make_celery, queue_for
from services.settings import Settings
from services.state.fleet import FleetStore
from services.state.redis import connect
from services.state.rollouts.store import RolloutStore

log = structlog.get_logger("slurm")

INIT_FLEET = f"{INIT} fleet"
HAND_BACK_S = 15.0
"""Beyond its own grace, for a worker to hand back and end."""
FAST_S = 20.0
"""For the end once TERM came: Slurm kills after KillWait (30 s)."""
HURRY_S = 30.0
"""With less until Slurm ends the job, workers get SIGUSR2 before TERM: they give up what they wait for."""
HURRIED_S = 8.0
"""For such workers to hand over what they hold, or half of what is left; it takes them three, as a rule."""
CLEAR_S = 2.0
"""For the end of the host, when what could leave the node has."""
MOST_MOVING_S = 60.0
"""For the files of what is left after a drain that somebody asked for."""
NOTICE = "notice"
"""A step of the job that does nothing: Slurm tells steps of a preemption at once, but the job itself, with
all that it has started, only when the grace time is over."""
NOTICE_COMMAND = (
    *("srun", "--quiet", "--overlap", "--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--mem=0"),
    *("--gres=none", "--mpi=none", "--cpu-bind=none", f"--job-name={NOTICE}", "sleep", "infinity"),
)
NOTICE_ENDS_S = 1.0
LET_GO_LOOK_S = 0.1
PREEMPTED_LOOKS = 5
"""At Slurm once that step was told to end: at first it may not say yet that the job is preempted."""
UNKNOWN_S = 15.0
"""Of a grace time of which Slurm does not say how long it is."""
MOVE_S = 5.0
"""For workers to end whose Redis is gone: they have nobody to hand back to."""
ANSWER_S = 10.0
"""For the workers of a busy node to say what they do; on an idle one it takes milliseconds."""
IDLE_LOOKS = 2
"""Between two lists a message is in none, so a node is idle when it was so in a row."""
CHECK_S = 600.0
"""For the first sandbox: the image is unpacked."""


class NodeJob(MemberJob):
    """A node job's life."""

    def __init__(self, run: RunDir, place: Place, stages: list[str]) -> None:
        super().__init__(run, place, NODE, stages)
        self.stages = stages
        chosen = {stage: int(os.environ.get(f"ROLLOUT_SLURM_SLOTS_{stage.upper()}") or 0) for stage in stages}
        self.member.slots = {stage: parts.slots_of(stage, chosen) for stage in stages}
        self._idle_looks = 0
        self._to_drain: set[str] = set()
        """Rollouts that were here when nothing new was to begin."""
        self._init_lives = True
        self._check: parts.SandboxCheck | None = None
        self._addresses_now: dict[str, str] = {}
        """Of the head, as the workers have them."""
        self._env: dict[str, str] = {}
        self._looks_left = 0

    # -- life --------------------------------------------------------------------------------

    def _start_programs(self) -> None:
        head = self._wait_for_head()
        self._env = self._environment()
        self._start_workers(self._addresses(head))
        self._publish()
        if INIT in self.stages:
            self._check_sandbox()

    def _wait_for_head(self) -> Head:
        """Wait until the head answers; Interrupted when the job is to end."""
        last_reason = ""
        while self.supervisor.signal is None and self._is_wanted():
            head = self.run_dir.head()
            reason = "it has not started yet" if head is None else f"it is {head.state}"
            if head is not None and head.state != DOWN:
                reason = ping(self.run_dir.redis_url(head)) or ""
                if not reason:
                    return head
            if reason != last_reason:
                log.info("waiting for the head", reason=reason)
                last_reason = reason
            self.supervisor.pause(LOOK_S)
        raise Interrupted

    def _environment(self, *without: str) -> dict[str, str]:
        root, sandboxes = self.scratch.root, self.scratch.path
        env = super()._environment("ROLLOUT_URL", "ROLLOUT_API_KEY", *without)
        env["ROLLOUT_NODE"] = self.place.name
        env["ROLLOUT_SANDBOX_DIR"] = str(sandboxes)
        env.setdefault("ROLLOUT_BUNDLE_CACHE", str(sandboxes / "bundles"))
        env.setdefault("ROLLOUT_SNAPSHOT_DIR", str(self.run_dir.snapshots))
        env["ROLLOUT_SANDBOX_CLOSED"] = parts.closed_to_sandboxes(env, self.run_dir.path)
        env.setdefault("TORCHINDUCTOR_CACHE_DIR", str(sandboxes / "torchinductor"))
        if root != Path("/tmp"):
            # Unpacked images stay from job to job.
            env.setdefault("ROLLOUT_IMAGE_CACHE", str(root / f"rollout-images-{os.getuid()}"))
        return env

    def _addresses(self, head: Head) -> dict[str, str]:
        """Variables that lead the workers to a head."""
        addresses = {"ROLLOUT_REDIS_URL": self.run_dir.redis_url(head)}
        capture = self.run_dir.capture_url()
        return addresses | ({"ROLLOUT_CAPTURE_URL": capture} if capture else {})

    def _start_workers(self, addresses: dict[str, str]) -> None:
        for stage in self.stages:
            part = parts.fleet(stage, self.member.slots[stage], self.place.name)
            self._spawn(part, self._env | addresses)
        self._addresses_now = addresses
        self._start_notice()

    def _start_notice(self) -> None:
        if self.place.step:  # it would be told itself
            return
        try:
            self._spawn(Part(NOTICE, [*NOTICE_COMMAND], dismissed=True), os.environ)
        except OSError as error:
            log.warning(
                "no step can listen: a preemption is heard of at the end of its grace", error=str(error)
            )

    def _listen(self) -> None:
        notice = self.supervisor.parts.get(NOTICE)
        if notice is not None and notice.process is not None and not notice.alive:
            del self.supervisor.parts[NOTICE]
            if (status := notice.process.wait(0)) == 128 + signal.SIGTERM:
                self._looks_left = PREEMPTED_LOOKS
            else:
                log.warning("the step that listens has ended", how=ended(status), log=notice.log)
        if self._looks_left and not self.preempted:
            self._looks_left -= 1
            if self._look_for_end() and self.supervisor.signal is None:
                self.ends_at, self.preempted = self.ends_at or time.monotonic() + UNKNOWN_S, True
                self.supervisor.signal = signal.SIGUSR1
            elif not self._looks_left:
                self._start_notice()

    def _check_sandbox(self) -> None:
        """Have the member tell what works here, as soon as that is known."""
        self._check = parts.SandboxCheck(self._env)
        threading.Thread(target=self._note_check, args=[self._check], daemon=True).start()

    def _note_check(self, check: parts.SandboxCheck) -> None:
        works, verdict = check.verdict(CHECK_S)
        if self._check is None:  # ended by `_stop`
            return
        self.member.sandbox = verdict if works else f"{NO_SANDBOX}: {verdict}"
        (log.info if works else log.error)("looked for sandboxes", found=self.member.sandbox)
        self._publish()

    def _tend(self) -> None:
        """Follow a head that came back elsewhere. Rollouts in hand are taken from their workers when their
        leases run out."""
        super()._tend()
        head = self.run_dir.head()
        if head is None or head.state == DOWN:
            return
        addresses = self._addresses(head)
        if addresses != self._addresses_now and ping(addresses["ROLLOUT_REDIS_URL"]) is None:
            log.warning("the head has moved: the workers start anew", node=head.node, address=head.address)
            self.supervisor.stop_all(MOVE_S)
            self._start_workers(addresses)

    # -- end ---------------------------------------------------------------------------------

    def _take_nothing_new(self) -> None:
        self._note_rollouts()
        if self._hurries():
            self.supervisor.send(signal.SIGUSR2)
        self.supervisor.dismiss(INIT_FLEET)

    def _note_rollouts(self) -> None:
        settings = self._settings()
        with suppress(redis.RedisError, OSError), connect(settings.redis_url, max_connections=2) as client:
            self._to_drain.update(RolloutStore(client, settings).on_node(self.place.name))

    def _is_drained(self) -> bool:
        try:
            with make_celery(self._settings()) as app:
                self._take_only_own(app)
                # What INIT has in hand goes on to this node's own queues, or back.
                init_lived, self._init_lives = self._init_lives, self.supervisor.lives(INIT_FLEET)
                if init_lived and not self._init_lives:  # it may have taken more
                    self._note_rollouts()
                idle = not self._init_lives and self._is_idle(app)
            self._idle_looks = self._idle_looks + 1 if idle else 0
        except (redis.RedisError, OperationalError, OSError) as error:
            log.warning("Redis does not answer; the drain goes on", error=str(error))
        return self._idle_looks >= IDLE_LOOKS

    def _take_only_own(self, app: Celery) -> None:
        """Have RUN and EVAL serve only those whose sandboxes are here. Again and again: a worker may start
        anew."""
        for stage in {RUN, EVAL}.intersection(self.stages):
            app.control.cancel_consumer(stage, destination=[f"{stage}@{self.place.name}"])

    def _is_idle(self, app: Celery) -> bool:
        """Whether no rollout of this node is in a worker's hands or waits for one."""
        names = [f"{stage}@{self.place.name}" for stage in (RUN, EVAL) if stage in self.stages]
        # With a limit it returns when all have answered; without, always after the whole time.
        inspect = app.control.inspect(destination=names, timeout=ANSWER_S, limit=len(names))
        active = inspect.active() or {} if names else {}
        if set(active) != set(names) or any(active.values()):
            return False
        settings = self._settings()
        with connect(settings.redis_url, max_connections=2) as client:
            waiting = sum(client.llen(queue_for(stage, self.place.name)) for stage in (RUN, EVAL))
            return waiting + RolloutStore(client, settings).ahead(self.place.name)[0] == 0

    def _settings(self) -> Settings:
        return Settings.from_env(self._env | self._addresses_now)

    def _stop(self) -> None:
        """End what is left, and give back what waits for this node."""
        if (check := self._check) is not None:
            self._check = None
            check.end()
        if self.supervisor.ends_now and not self.preempted:
            self.ends_at = time.monotonic() + FAST_S
        self.supervisor.stop([NOTICE], NOTICE_ENDS_S)
        if self.supervisor.parts:
            if self._hurries():
                self._hurry()
                self._hand_back()
                self.supervisor.stop_all(CLEAR_S)
                self._hand_back()  # what INIT still made ready
                return
            if not self.drained:
                # RUN first: what it finishes meanwhile is scored here.
                own_grace_s = Settings.from_env(self._env).shutdown_grace_s
                self.supervisor.stop([f"{RUN} fleet"], own_grace_s + HAND_BACK_S)
            self.supervisor.stop_all(FAST_S)
            self._hand_back()

    def _hurry(self) -> None:
        """Have RUN and EVAL hand over what they hold. INIT may take longer, and so do the ends of all."""
        until = time.monotonic() + min(HURRIED_S, self._left_s() / 2)
        self.supervisor.send(signal.SIGUSR2)
        for name in self.supervisor.parts:
            self.supervisor.dismiss(name)
        settings = self._settings()
        with suppress(redis.RedisError, OSError), connect(settings.redis_url, max_connections=2) as client:
            fleet = FleetStore(client)
            while time.monotonic() < until and any(map(self.supervisor.lives, self.supervisor.parts)):
                here = (worker for worker in fleet.workers() if worker.node == self.place.name)
                if not any({RUN, EVAL}.intersection(worker.stages) for worker in here):
                    break
                time.sleep(LET_GO_LOOK_S)
        log.info("what waits here is to leave", left_s=round(self._left_s(), 1))

    def _left_s(self) -> float:
        """Seconds for what is left here to leave."""
        left_s = MOST_MOVING_S if self.ends_at is None else self.ends_at - CLEAR_S - time.monotonic()
        return max(0.0, min(left_s, MOST_MOVING_S))

    def _hurries(self) -> bool:
        return self._left_s() < HURRY_S

    def _hand_back(self) -> None:
        """Rollouts that wait for this node's workers go on elsewhere, or begin anew; the reaper would see to
        it later."""
        settings = self._settings()
        try:
            left_s = self._left_s()
            count = hand_back(settings, self.place.name, within_s=left_s, state_dir=self.scratch.path)
            with connect(settings.redis_url, max_connections=2) as client:
                store = RolloutStore(client, settings)
                states = [store.state(item) for item in self._to_drain]
        except (redis.RedisError, OSError) as error:
            log.warning("Redis does not answer; the reaper hands back what waits here", error=str(error))
            return
        if count:
            log.info("handed back what waited here", count=count, left_s=round(self._left_s(), 1))
        if self.member.state == DRAINING:
            finished = states.count(State.COMPLETED)
            left = sum(state is not None and not state.terminal for state in states)
            became = f"{finished} rollouts finished, {left} handed back"
            if others := len(states) - finished - left:
                became += f", {others} failed, were cancelled or are not known any more"
            became_of = "was preempted" if self.preempted else "drained"
            text = f"{self.place.node} (job {self.place.job}) {became_of} at {time.strftime('%X')}: {became}"
            with self._going_on():
                self.run_dir.write_private(self.run_dir.path / "control" / f"{self.name}.drained", text)
