"""What the jobs of the service have in common: the life of a job from its first signal handler to its end in
order.

`ServiceJob.run` is that life: start, serve, drain, end. `MemberJob` is a job beside the head, which carries
rollouts or LLM servers: it describes itself in the run directory, has a node-local directory, and drains.
deploy/slurm/*.sbatch become `python -m services.launch.slurm.job head|node|engine RUN`.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import structlog

from services import logs
from services.launch import SlurmError, StackError
from services.launch.slurm import place as places
from services.launch.slurm import scheduler
from services.launch.slurm.place import Place, Scratch
from services.launch.slurm.plan import ENGINE, HEAD, NODE
from services.launch.slurm.rundir import DRAINING, UP, Member, RunDir
from services.launch.supervisor import LOOK_S, Interrupted, Part, Supervisor
from services.queues import STAGES
from services.settings import SettingsError, settings

log = structlog.get_logger("slurm")

DRAIN_S = 75.0
"""For rollouts to end when the time limit is near: of the 120 s that `#SBATCH --signal` gives."""
HAND_OVER_S = 45.0
"""Of what is left until Slurm ends a job: for all that follows when rollouts have had their time."""
TAKEN_S = 90.0
"""Slurm looks twice a minute for jobs whose time is over."""


class ServiceJob(ABC):
    """A job of the service, or a step of the job that carries all of it."""

    def __init__(self, run: RunDir, place: Place, name: str, logs: Path) -> None:
        """
        Args:
            name: By which `rollout slurm` asks it to end.
            logs: Directory of its programs' logs.
        """
        self.run_dir = run
        self.place = place
        self.name = name
        self.supervisor = Supervisor(logs, SlurmError, die_with_parent=True)
        self.ends_at: float | None = None
        """When Slurm ends the job, by the monotonic clock, as far as that is known."""
        self.preempted = False

    def run(self) -> int:
        """Serve until a signal or `rollout slurm` says to end; the exit status of the job.

        Raises:
            SlurmError: It cannot start; the message says why.
        """
        self.supervisor.listen()
        self._prepare()
        renews = False
        try:
            self._start()
            self._drain(self._serve())
        except Interrupted:
            pass
        finally:
            renews = self.supervisor.near_limit and self._asked() is None
            self._end()
        # Asked again: somebody may have wanted its end meanwhile.
        if self.preempted:
            self._await_slurm()
        elif renews and self._asked() is None:
            self.place.requeue_if_wanted()
        return 0

    def _await_slurm(self) -> None:
        """Slurm queues a preempted job again that it ends itself, and none that has ended in time."""
        log.info("waiting for Slurm to take the node")
        until = (self.ends_at or time.monotonic()) + TAKEN_S
        while time.monotonic() < until and not self.supervisor.ends_now and self._asked() is None:
            time.sleep(LOOK_S)

    def _look_for_end(self) -> bool:
        """Ask Slurm how much time there is; whether it takes the node away, as far as it says."""
        left_s, self.preempted = scheduler.ends(self.place.job)
        if left_s is not None:
            self.ends_at = time.monotonic() + left_s
        log.info("what Slurm says of the job's end", left_s=left_s, preempted=self.preempted)
        return self.preempted or left_s is None

    @abstractmethod
    def _prepare(self) -> None:
        """Refuse what cannot be. Nothing has to be ended when this fails."""

    @abstractmethod
    def _start(self) -> None:
        """Start the programs; Interrupted when the job is to end meanwhile."""

    def _serve(self) -> float | None:
        """Until the end is near. Seconds of grace if somebody asked for it, None for a signal."""
        while True:
            asked = self._asked()
            if asked is not None or self.supervisor.signal is not None:
                return asked
            with self._going_on():
                self.supervisor.look()
                self._tend()
            self.supervisor.pause(LOOK_S)

    def _tend(self) -> None:  # noqa: B027 - nothing to do is the usual case
        """What is to be done again and again while the job serves."""

    @abstractmethod
    def _drain(self, asked: float | None) -> None:
        """Let what is under way end, as long as there is time.

        Args:
            asked: Seconds of grace that somebody gave; None = a signal says to end.
        """

    @abstractmethod
    def _end(self) -> None:
        """End the programs and leave nothing, whatever was started."""

    def _environment(self, *without: str) -> dict[str, str]:
        """What the job's programs get of its environment."""
        env = places.clean(os.environ) | {"PYTHONUNBUFFERED": "1"}
        return {name: value for name, value in env.items() if name not in without}

    def _spawn(self, part: Part, env: Mapping[str, str]) -> Part:
        self.supervisor.start(part, env)
        log.info("started", part=part.name, pid=part.pid, log=part.log)
        return part

    def _asked(self) -> float | None:
        """Seconds of grace that `rollout slurm` gave this job to end; None = it was not asked to."""
        with self._going_on():
            # Slurm's signals to steps reach every process in them: a file says what USR1 says.
            if self.place.step and self.supervisor.signal is None and self.run_dir.job_ends(self.place.job):
                self.supervisor.signal = signal.SIGUSR1
            return self.run_dir.asked_to_drain(self.name)
        return None

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """A file system that fails for a while is no reason to end the rollouts of a node."""
        try:
            yield
        except (SlurmError, OSError) as error:
            log.warning("failed; the next look tries again", error=str(error))


class MemberJob(ServiceJob):
    """A job that carries rollouts or LLM servers."""

    def __init__(self, run: RunDir, place: Place, role: str, stages: list[str] | None = None) -> None:
        super().__init__(run, place, place.name, run.logs / place.name)
        self.member = Member(place.name, role, place.job, place.node, UP, stages or [])
        self._scratch: Scratch | None = None
        self.drained = False
        """Whether nothing was under way here when the drain ended."""
        self._publishing = threading.Lock()
        self._has_ended = False

    @property
    def scratch(self) -> Scratch:
        """The node-local directory; there is one from `_prepare` on."""
        assert self._scratch is not None
        return self._scratch

    def _prepare(self) -> None:
        root = Path(os.environ.get("ROLLOUT_SLURM_SCRATCH") or "/tmp")
        self._scratch = Scratch(root, self.run_dir.service, self.place.job)

    def _start(self) -> None:
        if not self.place.step:
            self.run_dir.forget_earlier_life(self.place.job)
        for name in self.scratch.sweep():
            log.info("swept what an earlier job left", directory=name)
        self._start_programs()

    @abstractmethod
    def _start_programs(self) -> None:
        """Start what the job carries, and publish the member."""

    def _publish(self) -> None:
        """Have everybody see what the job says of itself; from any thread, and no more once it has ended."""
        with self._publishing:
            if not self._has_ended:
                self.run_dir.write_member(self.member)

    def _tend(self) -> None:
        self._listen()
        failing = self.supervisor.failing()
        if failing != self.member.failing:
            self.member.failing = failing
            self._publish()

    def _is_wanted(self) -> bool:
        """Whether a job that still starts is to go on: nobody asked it to end, nor the whole service."""
        with self._going_on():
            return self._asked() is None and self.run_dir.asked_to_drain(HEAD) is None
        return True

    def _drain(self, asked: float | None) -> None:
        if self.supervisor.ends_now:
            return
        if asked is None and self.ends_at is None:
            self._look_for_end()
        begun = time.monotonic()
        log.info("draining", grace_s=self._grace_s(asked, begun))
        self.member.state = DRAINING
        with self._going_on():
            self._publish()
        self._take_nothing_new()
        # What is asked may change meanwhile: `down` has less patience than `drain`.
        while time.monotonic() < begun + self._grace_s(asked, begun) and not self.supervisor.ends_now:
            with self._going_on():
                self._listen()
                self.drained = self._is_drained()
                self.supervisor.look()
            if self.drained:
                break
            time.sleep(LOOK_S)
        log.info("drained" if self.drained else "time is up: what is left is handed back")

    def _grace_s(self, asked: float | None, begun: float) -> float:
        """What was asked last, else what is for rollouts before a time limit; no more than there is. The file
        may be seen after the signal."""
        latest = self._asked()
        asked = asked if latest is None else latest
        grace_s = float(os.environ.get("ROLLOUT_SLURM_DRAIN_S") or DRAIN_S) if asked is None else asked
        return grace_s if self.ends_at is None else min(grace_s, self.ends_at - HAND_OVER_S - begun)

    def _listen(self) -> None:
        """Called again and again, from the start to the end of the drain."""

    def _take_nothing_new(self) -> None:
        """Called once, at the beginning of the drain."""

    @abstractmethod
    def _is_drained(self) -> bool:
        """Whether nothing is under way here any more. Asked again and again."""

    def _end(self) -> None:
        try:
            self._stop()
        finally:
            if self._scratch is not None:
                self._scratch.remove()
            with self._publishing:
                self._has_ended = True
                self.run_dir.forget_member(self.name)
        log.info("ended in order")

    @abstractmethod
    def _stop(self) -> None:
        """End the programs, handing back what is left."""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m services.launch.slurm.job",
        description="A job of the service, as deploy/slurm/*.sbatch start it.",
    )
    parser.add_argument("role", choices=[HEAD, NODE, ENGINE])
    parser.add_argument("run_dir", type=Path, help="the run directory, seen by every node")
    parser.add_argument("--stages", default=",".join(STAGES), help="of a node: init,run,eval or some of them")
    args = parser.parse_args(argv)
    args.stages = [stage for stage in args.stages.split(",") if stage]
    if not args.stages or set(args.stages) - set(STAGES):
        parser.error(f"--stages {','.join(args.stages) or '(none)'}: there are {', '.join(STAGES)}")
    return args


def main() -> int:
    """Entry point; 1 with the reason in the job's output when it cannot go on."""
    args = parse_args()
    try:
        logs.configure(settings())
        run, place = RunDir(args.run_dir), Place.here()
        logs.identify(node=place.name)
        run.make()
        if args.role == HEAD:
            from services.launch.slurm.head import HeadJob

            return HeadJob(run, place).run()
        if args.role == ENGINE:
            from services.launch.slurm.engine import EngineJob

            return EngineJob(run, place).run()
        from services.launch.slurm.node import NodeJob

        return NodeJob(run, place, args.stages).run()
    except (SlurmError, StackError, SettingsError) as error:
        log.error(str(error))
        print(f"rollout slurm: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    sys.exit(main())
