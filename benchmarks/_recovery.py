"""How soon the rollouts of a worker that was killed are claimed by another one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from benchmarks._latency import say
from rollout.schema import RolloutRequest, State
from services.state.fleet import FleetStore
from tests.helpers.stack import NODE, Process, Stack, wait_until

HELD = 55
"""Rollouts that the worker holds when it is killed."""
SLOTS = 64
STAGES = ("init", "run", "eval")
KILLED = ("run", "init", "eval")
"""In turn; RUN first, where rollouts spend most of their time."""
HOLDS = {"init": State.INITIALIZING, "run": State.RUNNING, "eval": State.EVALUATING}
PATIENCE_S = 180.0


class Service:
    """A whole service with one worker a stage, which can be killed."""

    def __init__(self, directory: Path, lease_s: float) -> None:
        self.lease_s = lease_s
        env = {
            "ROLLOUT_HANDLERS": "",
            "ROLLOUT_LOG_LEVEL": "WARNING",
            "ROLLOUT_LEASE_S": str(lease_s),
            # As in production: those of the tests are quicker.
            "ROLLOUT_REAPER_INTERVAL_S": "1",
            "ROLLOUT_REQUEUE_S": "30",
        }
        self.stack = Stack(directory, directory / "sbx", env)
        self._fleet = FleetStore(self.stack.redis.client)
        self._number = 0
        self.workers = {stage: self._start(stage) for stage in STAGES}
        for stage, worker in self.workers.items():
            self._wait_for(stage, worker)
        wait_until(self._fleet.handlers, PATIENCE_S, "the handlers to be announced")

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def _start(self, stage: str) -> Process:
        self._number += 1
        name = f"{stage}{self._number}"
        return self.stack.start(name, [*Stack.worker_argv(stage, name), "-E", "-c", str(SLOTS)])

    def _wait_for(self, stage: str, worker: Process) -> None:
        name = f"{worker.name}@{NODE}"
        wait_until(lambda: name in self._fleet.alive()[stage], PATIENCE_S, f"worker {name}", worker)

    def seconds_over_lease(self, stage: str) -> float:
        """Kill the stage's worker with all its rollouts; seconds until each has another, less the lease.

        Rollouts in INIT or RUN begin afresh and have to come through INIT again. Below zero where heartbeats
        were a while ago: a lease counts from the last one.
        """
        client = self.stack.client
        task = {f"{stage}_s": 3600.0}
        ids = [new.id for new in client.submit([RolloutRequest(handler="noop", task=task, n=HELD)])]
        victim = self.workers[stage]
        wait_until(lambda: self._held(ids, stage, victim.name) == HELD, PATIENCE_S, f"{HELD} leases")
        heir = self.workers[stage] = self._start(stage)
        self._wait_for(stage, heir)
        os.killpg(victim.pid, signal.SIGKILL)
        began = time.monotonic()
        while self._held(ids, stage, heir.name) < HELD:
            if time.monotonic() - began > PATIENCE_S:
                raise TimeoutError(f"not all of {HELD} rollouts were claimed again in {PATIENCE_S:g} s")
            time.sleep(0.01)
        over = time.monotonic() - began - self.lease_s
        victim.kill()
        self.stack.processes.remove(victim)
        for rollout_id in ids:
            client.cancel(rollout_id)
        wait_until(lambda: self._ended(ids), PATIENCE_S, "the end of all rollouts")
        say(f"recovery from a killed worker of {stage}: lease {over:+.2f} s")
        return over

    def _held(self, ids: list[str], stage: str, worker: str) -> int:
        with self.stack.redis.client.pipeline(transaction=False) as pipe:
            for rollout_id in ids:
                pipe.hmget(f"rollout:{{{rollout_id}}}", "state", "owner")
            return sum(
                state == HOLDS[stage] and (owner or "") == f"{worker}@{NODE}"
                for state, owner in pipe.execute()
            )

    def _ended(self, ids: list[str]) -> bool:
        with self.stack.redis.client.pipeline(transaction=False) as pipe:
            for rollout_id in ids:
                pipe.hexists(f"rollout:{{{rollout_id}}}", "finished")
            return all(pipe.execute())
