"""The fleets are plain Celery: started by hand, seen in Flower."""

from __future__ import annotations

import sys

import httpx

from rollout.schema import RolloutRequest, State
from tests.helpers.stack import NODE, free_port, wait_until


def test_a_worker_started_by_hand_joins_and_takes_work(stack, client):
    """No option but the queue: the pool and its size come from the application's own settings."""
    argv = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "workers.app",
        "worker",
        "-Q",
        "run",
        "-n",
        f"byhand@{NODE}",
    ]
    worker = stack.start("byhand", argv)
    try:
        wait_until(lambda: f"byhand@{NODE}" in client.status()["workers"]["run"], 30, "it to join", worker)
        done = client.run([RolloutRequest(handler="noop", task={"run_s": 0.2}) for _ in range(40)])
    finally:
        worker.stop()
    owners = {event.owner for item in done for event in item.timeline if event.state is State.RUNNING}
    assert owners == {f"run@{NODE}", f"byhand@{NODE}"}
    assert "concurrency: 64 (thread)" in worker.log.read_text()
    assert f"byhand@{NODE}" not in client.status()["workers"]["run"], "it has taken itself off the list"


def test_a_worker_that_cannot_start_ends_and_says_why(stack):
    argv = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        "workers.app",
        "worker",
        "-Q",
        "run",
        "-n",
        f"broken@{NODE}",
    ]
    worker = stack.start("broken", argv, {"ROLLOUT_HANDLERS": "no_such_module:Handler"})
    assert worker.popen.wait(30) != 0
    assert "No module named 'no_such_module'" in worker.log.read_text()


def test_flower_shows_the_three_fleets(stack, client):
    port = free_port()
    argv = [sys.executable, "-m", "celery", "-A", "workers.app", "flower", "--address=127.0.0.1"]
    flower = stack.start("flower", [*argv, f"--port={port}", "--basic-auth=user:secret"])
    base = f"http://127.0.0.1:{port}"

    http = httpx.Client(base_url=base, auth=("user", "secret"), timeout=10)

    def workers():
        try:
            return http.get("/api/workers?refresh=true").json()
        except (httpx.HTTPError, ValueError):
            return {}

    names = {f"{stage}@{NODE}" for stage in ("init", "run", "eval")}
    try:
        wait_until(lambda: names <= set(workers()), 40, "Flower to see the fleets", flower)
        found = workers()
        client.run([RolloutRequest(handler="noop", n=3)])
        tasks = wait_until(
            lambda: http.get("/api/tasks").json() or None,
            20,
            "Flower to see tasks",
            flower,
        )
    finally:
        flower.stop()
    queues = {name: {queue["name"] for queue in found[name]["active_queues"]} for name in names}
    assert queues[f"init@{NODE}"] == {"init"}
    assert queues[f"run@{NODE}"] == {"run", f"run.{NODE}"}
    assert queues[f"eval@{NODE}"] == {"eval", f"eval.{NODE}"}
    assert {task["name"] for task in tasks.values()} <= {"rollout.init", "rollout.run", "rollout.evaluate"}
