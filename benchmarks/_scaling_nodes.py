"""Virtual nodes of `scaling`: a real head, and for each node its own INIT, RUN and EVAL worker processes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from benchmarks._latency import percentile, say
from rollout.schema import RolloutRequest
from sandbox.host import SOCKET_NAME
from sandbox.host_client import SyncHostClient
from services.queues import make_celery
from services.settings import Settings
from services.state import keys
from tests.helpers.stack import Process, Stack, wait_until

STAGES = ("init", "run", "eval")
AT_ONCE = 3
"""Workers that start at the same time: each imports for seconds."""
PATIENCE_S = 300.0
PER_CALL = 500
"""Rollouts of one call of submission."""
POLL_S = 0.02
REPLY_S = 5.0
"""For workers to answer a control command."""
ENV = {
    "ROLLOUT_HANDLERS": "benchmarks._scaling_handler:Simulated",
    "ROLLOUT_LOG_LEVEL": "WARNING",
    # As in production: those of the tests are quicker.
    "ROLLOUT_LEASE_S": "30",
    "ROLLOUT_REAPER_INTERVAL_S": "1",
    "ROLLOUT_REQUEUE_S": "30",
    "ROLLOUT_RETRY_DELAY_S": "1",
    # What this machine has left is not what is measured.
    "ROLLOUT_NODE_MIN_FREE_DISK_MB": "0",
    "ROLLOUT_NODE_MIN_FREE_MEMORY_MB": "0",
}


@dataclass(frozen=True)
class Slots:
    """Of the three workers of a node."""

    init: int
    run: int
    eval: int


@dataclass(frozen=True)
class Outcome:
    """What a fixed amount of work took."""

    count: int
    seconds: float
    """From the call that submits the first one to the end of the last one: ramps included."""
    steady_per_s: float
    """Rollouts a second between the first and the last fifth of those that ended."""
    waits_s: dict[str, list[float]]
    """Stage → seconds that each rollout waited for it."""

    @property
    def per_s(self) -> float:
        return self.count / self.seconds


class Nodes:
    """A head with virtual nodes; a context manager that ends them."""

    def __init__(self, directory: Path, sandboxes: Path, count: int, most: Slots, real: bool = False) -> None:
        """
        Args:
            sandboxes: A short path for the nodes' sockets.
            most: What the workers are started with; `give` may lower it.
            real: Sandboxes of the real host, which each node then has its own of.
        """
        self.count, self._most, self._sandboxes, self._real = count, most, sandboxes, real
        self.init_env: dict[str, str] = {}
        """Further variables of INIT workers that `use` starts."""
        self._workers: dict[str, Process] = {}
        self.stack = Stack(directory, sandboxes, ENV)
        self._control = make_celery(Settings(redis_url=self.stack.redis.url)).control
        self.client = self.stack.client
        self.redis = self.stack.redis.client
        if not real:
            hosts = [str(self._state(number)) for number in range(count)]
            self._host = self.stack.start("hosts", [sys.executable, "-m", "benchmarks._scaling_host", *hosts])
            wait_until(
                lambda: all(Path(one, SOCKET_NAME).exists() for one in hosts), 60, "the hosts", self._host
            )
        self.start([(stage, number) for number in range(count) for stage in ("run", "eval")])

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.popen.terminate()
        if self._real:
            # Before their workers' patience with them runs out: they end what is left of sandboxes.
            for number in range(self.count):
                SyncHostClient(self._state(number)).stop()
        self.stack.close()

    def _state(self, number: int) -> Path:
        return self._sandboxes / f"n{number}"

    def start(self, wanted: Iterable[tuple[str, int]]) -> None:
        """Start workers, few at a time; returns when all have announced themselves."""
        wanted = list(wanted)
        for first in range(0, len(wanted), AT_ONCE):
            some = wanted[first : first + AT_ONCE]
            began = time.time()
            for stage, number in some:
                name = f"{stage}@n{number}"
                argv = [sys.executable, "-m", "celery", "-A", "workers.app", "worker", "-Q", stage]
                argv += ["-n", name, "--without-gossip", "--without-mingle"]
                argv += ["-c", str(getattr(self._most, stage))]
                env = {"ROLLOUT_NODE": f"n{number}", "ROLLOUT_SANDBOX_DIR": str(self._state(number))}
                env |= self.init_env if stage == "init" else {}
                self._workers[name] = self.stack.start(name, argv, env)
            for stage, number in some:
                name = f"{stage}@n{number}"
                # Later than now: its namesake of the last round may be on the list yet.
                ready = partial(self._announced, stage, name, began)
                wait_until(ready, PATIENCE_S, f"worker {name}", self._workers[name])

    def _announced(self, stage: str, name: str, since: float) -> bool:
        return (self.redis.zscore(keys.workers(stage), name) or 0.0) > since

    def use(self, count: int) -> None:
        """Have so many nodes take part: INIT decides where a rollout lives; only its workers come and go."""
        have = {number for number in range(self.count) if f"init@n{number}" in self._workers}
        leaving = [self._workers.pop(f"init@n{number}") for number in have if number >= count]
        for worker in leaving:
            worker.popen.terminate()
        for worker in leaving:
            worker.stop()
            self.stack.processes.remove(worker)
        self.start([("init", number) for number in range(count) if number not in have])

    def give(self, slots: Slots) -> None:
        """Give every worker so many slots, by the control command that an operator uses."""
        for stage in STAGES:
            names = [name for name in self._workers if name.startswith(stage)]
            told = {"slots": getattr(slots, stage)}
            deadline = time.monotonic() + PATIENCE_S
            while names:
                replies = self._control.broadcast(
                    "set_slots", told, names, reply=True, timeout=REPLY_S, limit=len(names)
                )
                said = {name: answer for one in replies or () for name, answer in one.items()}
                if any("ok" not in answer for answer in said.values()) or time.monotonic() > deadline:
                    raise RuntimeError(f"set_slots {told}: {said}, nothing from {names}")
                # One that has only just started may not listen yet.
                names = [name for name in names if name not in said]

    @property
    def head_pids(self) -> list[int]:
        """Redis and the gateway with its workers."""
        gateway = psutil.Process(self.stack.gateway.pid)
        return [self.stack.redis.pid, gateway.pid, *(one.pid for one in gateway.children(recursive=True))]

    @property
    def worker_pids(self) -> list[int]:
        return [worker.pid for worker in self._workers.values()]

    def ended(self) -> int:
        """Rollouts that have ended so far; fails on one that ended badly."""
        counts = {state: int(count) for state, count in self.redis.hgetall("rollouts:counts").items()}
        if bad := counts.get("failed", 0) + counts.get("timed_out", 0):
            raise RuntimeError(f"{bad} rollouts failed; see {self.stack.directory}")
        return counts.get("completed", 0)

    def work(self, tasks: list[dict[str, float]], what: str) -> Outcome:
        """Put tasks through, all submitted at once."""
        before, ids = self.ended(), []
        requests = [RolloutRequest(handler="simulated", task=task) for task in tasks]
        began = time.monotonic()
        for first in range(0, len(requests), PER_CALL):
            ids += [new.id for new in self.client.submit(requests[first : first + PER_CALL])]
        while self.ended() < before + len(tasks):
            if time.monotonic() - began > PATIENCE_S:
                raise TimeoutError(f"{what}: not all of {len(tasks)} rollouts ended in {PATIENCE_S:g} s")
            time.sleep(POLL_S)
        seconds = time.monotonic() - began
        finished, waits = self._times(ids)
        low, high = len(finished) // 5, len(finished) * 4 // 5
        steady = (high - low) / max(finished[high] - finished[low], 1e-9)
        outcome = Outcome(len(tasks), seconds, steady, waits)
        p99 = {stage: round(percentile(values, 0.99), 3) for stage, values in waits.items()}
        say(f"{what}: {outcome.per_s:.2f} rollouts/s ({steady:.2f} steady), {seconds:.1f} s, waits p99 {p99}")
        return outcome

    def _times(self, ids: list[str]) -> tuple[list[float], dict[str, list[float]]]:
        """When each ended, ascending, and how long each waited for each stage; by Redis' clock."""
        finished, waits = [], {stage: [] for stage in STAGES}
        with self.redis.pipeline(transaction=False) as pipe:
            for rollout_id in ids:
                pipe.lrange(f"rollout:{{{rollout_id}}}:timeline", 0, -1)
            for lines in pipe.execute():
                at = [int(line.split()[1]) / 1e3 for line in lines if not line.startswith("note ")]
                # queued, initializing, ready, running, evaluating, evaluating (claimed), completed
                if len(at) != 7:
                    raise RuntimeError(f"a rollout did not go straight through: {lines}")
                for stage, number in zip(STAGES, (0, 2, 4), strict=True):
                    waits[stage].append(at[number + 1] - at[number])
                finished.append(at[-1])
        return sorted(finished), waits
