"""The fleets are plain Celery: started by hand."""

from __future__ import annotations

import sys
from pathlib import Path

from rollout.schema import RolloutRequest, State
from tests.helpers.stack import NODE, wait_until


def run_worker(name: str) -> list[str]:
    """What an operator types."""
    command = f"-m celery -A workers.app worker -Q run -n {name}@{NODE}"
    return [sys.executable, *command.split()]


def test_a_worker_started_by_hand_joins_and_takes_work(stack, client):
    """No option but the queue: the pool and its size come from the application's own settings. Nor does a
    rollout wait for the import of tokenizers: a worker that has taken none has them."""
    worker = stack.start("byhand", run_worker("byhand"), {"ROLLOUT_PRELOAD_TOKENIZERS": "1"})
    maps = Path(f"/proc/{worker.pid}/maps")

    def running() -> list:
        return client.list(State.RUNNING, tag="byhand", limit=100).rollouts

    try:
        wait_until(lambda: "/tokenizers" in maps.read_text(), 120, "tokenizers", worker)
        wait_until(lambda: f"byhand@{NODE}" in client.status()["workers"]["run"], 120, "it to join", worker)
        # More than the other worker carries at once, should it be the quicker one; none ends before all run.
        request = RolloutRequest(handler="noop", task={"run_s": 600.0}, n=80, tags=["byhand"])
        ids = [item.id for item in client.submit(request)]
        wait_until(lambda: len(running()) == 80, 120, "all of them to run", worker)
        client.cancel_many(ids)
        done = [client.wait(rollout_id, timeout=120) for rollout_id in ids]
    finally:
        worker.stop(60)
    owners = {event.owner for item in done for event in item.timeline if event.state is State.RUNNING}
    assert owners == {f"run@{NODE}", f"byhand@{NODE}"}
    assert "concurrency: 64 (thread)" in worker.log.read_text()
    assert f"byhand@{NODE}" not in client.status()["workers"]["run"], "it has taken itself off the list"


def test_a_worker_that_cannot_start_ends_and_says_why(stack):
    worker = stack.start("broken", run_worker("broken"), {"ROLLOUT_HANDLERS": "no_such_module:Handler"})
    assert worker.popen.wait(120) != 0
    assert "No module named 'no_such_module'" in worker.log.read_text()
