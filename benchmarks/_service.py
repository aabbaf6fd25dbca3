"""A service to measure, with the settings of production, and its workers."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks._harness import private_directory
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


@contextmanager
def service(**env: str) -> Iterator[Stack]:
    """Redis and a gateway in private directories; what is started on it ends with it."""
    with (
        tempfile.TemporaryDirectory(prefix="bench-") as directory,
        private_directory() as sandboxes,
        Stack(Path(directory), sandboxes, {**ENV, **env}) as stack,
    ):
        yield stack


def launch(stack: Stack, queue: str, name: str, slots: int, app: str = "workers.app", **env: str) -> Process:
    """Start a worker by the command that an operator uses; `name` is that of Celery."""
    argv = [sys.executable, "-m", "celery", "-A", app, "worker", "-Q", queue, "-n", name]
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
