"""A service to measure, with the settings of production, and its workers."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benchmarks._harness import cpu_seconds, private_directory
from services.state import keys
from tests.helpers.stack import Process, Stack, wait_until

STAGES = ("init", "run", "eval")
ENV = {
    "ROLLOUT_HANDLERS": "",
    "ROLLOUT_LOG_LEVEL": "WARNING",
    # As in production: those of the tests are quicker.
    "ROLLOUT_LEASE_S": "30",
    "ROLLOUT_REAPER_INTERVAL_S": "1",
    "ROLLOUT_REQUEUE_S": "30",
    "ROLLOUT_RETRY_DELAY_S": "1",
}
PATIENCE_S = 300.0
"""How long anything may take on a machine that is busy with other things."""
REST_SHARE, REST_PATIENCE_S = 0.03, 60.0
"""Workers that use less of a processor each have done with what they import after their start."""


@contextmanager
def service(**env: str) -> Iterator[Stack]:
    """Redis and a gateway in private directories; what is started on it ends with it."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as directory,
        private_directory() as sandboxes,
        Stack(Path(directory), sandboxes, {**ENV, **env}) as stack,
    ):
        yield stack


def launch(stack: Stack, stage: str, name: str, slots: int, **env: str) -> Process:
    """Start a worker of a stage by the command that an operator uses; `name` is that of Celery."""
    argv = [sys.executable, "-m", "celery", "-A", "workers.app", "worker", "-Q", stage, "-n", name]
    return stack.start(name, [*argv, "--without-gossip", "--without-mingle", "-E", "-c", str(slots)], env)


def await_worker(stack: Stack, stage: str, worker: Process, since: float = 0.0) -> None:
    """Wait until the worker has announced itself later than `since`, in seconds of Unix time."""

    def announced() -> bool:
        return (stack.redis.client.zscore(keys.workers(stage), worker.name) or 0.0) > since

    wait_until(announced, PATIENCE_S, f"worker {worker.name}", worker)


def start_fleet(stack: Stack, slots: int) -> dict[str, Process]:
    """One worker for each stage."""
    fleet = {stage: launch(stack, stage, f"{stage}@{stack.env['ROLLOUT_NODE']}", slots) for stage in STAGES}
    for stage, worker in fleet.items():
        await_worker(stack, stage, worker)
    wait_until(lambda: stack.redis.client.exists(keys.HANDLERS), PATIENCE_S, "the handlers to be announced")
    return fleet


def discard(stack: Stack, *workers: Process) -> None:
    """End workers and forget them."""
    for worker in workers:
        worker.popen.terminate()
    for worker in workers:
        worker.stop()
        stack.processes.remove(worker)


def rest(pids: list[int]) -> None:
    """Wait until the processes have done with their start, or for a minute."""
    deadline = time.monotonic() + REST_PATIENCE_S
    while time.monotonic() < deadline:
        before = cpu_seconds(pids)
        time.sleep(1.0)
        if cpu_seconds(pids) - before < REST_SHARE * len(pids):
            return


def memory_mb(pids: list[int], kind: str) -> float:
    """`pss` or `rss` of processes in 10⁶ bytes; 0 for one that has ended."""
    total = 0
    for pid in pids:
        try:
            total += getattr(psutil.Process(pid).memory_full_info(), kind)
        except psutil.NoSuchProcess:
            continue
    return total / 1e6
