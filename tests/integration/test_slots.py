"""`celery control set_slots` on a real worker: fewer slots, more again, nothing lost."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from rollout.schema import RolloutRequest
from services.queues import make_celery
from services.settings import Settings
from services.state.fleet import FleetStore
from services.state.redis import connect
from tests.helpers.stack import NODE, ROOT, wait_until

RUN = f"run@{NODE}"
MOST = 64
"""Of the stack's worker."""
PATIENCE_S = 120


@pytest.fixture
def control(stack):
    control = make_celery(Settings(redis_url=stack.redis.url)).control
    yield control
    set_slots(control, MOST)


def set_slots(control, slots):
    """What the worker answers."""
    (reply,) = control.broadcast(
        "set_slots", arguments={"slots": slots}, destination=[RUN], reply=True, timeout=PATIENCE_S, limit=1
    )
    return reply[RUN]


def test_a_running_worker_is_given_fewer_slots_and_more_again_without_losing_what_it_holds(stack, control):
    argv = [sys.executable, "-m", "celery", "-A", "workers.app", "control", "set_slots", "2", "-d", RUN]
    # It waits a second by itself; with one destination the first answer is the last.
    argv += ["--timeout", str(PATIENCE_S)]
    done = subprocess.run(
        argv, cwd=ROOT, env=stack.env, capture_output=True, text=True, timeout=240, check=True
    )
    assert f"2 slots (of {MOST}), {MOST} before" in done.stdout
    made = stack.client.submit([RolloutRequest(handler="noop", task={"run_s": 600}, n=8)])
    group = made[0].group_id

    def wait_for(**counts):
        def states():
            return Counter(rollout.state.value for rollout in stack.client.list(group_id=group).rollouts)

        wait_until(lambda: states() == Counter(counts), PATIENCE_S, f"{counts} of the rollouts")

    # All eight are through INIT: a worker that still had its slots would have taken them.
    wait_for(ready=6, running=2)
    # More than six where a slow machine lets the reaper ring again for those that wait.
    wait_until(lambda: stack.redis.client.llen("run") >= 6, PATIENCE_S, "six messages to stay in the queue")
    worker = next(row for row in FleetStore(connect(stack.redis.url)).workers() if row.name == RUN)
    assert (worker.slots, worker.slots_limit, worker.node, worker.stages) == (2, MOST, NODE, ["run"])

    assert "5 slots" in set_slots(control, 5)["ok"]
    wait_for(ready=3, running=5)

    assert "1 slots" in set_slots(control, 1)["ok"]
    running = [
        rollout.id for rollout in stack.client.list(group_id=group).rollouts if rollout.state == "running"
    ]
    for rollout_id in running[:2]:
        stack.client.cancel(rollout_id)
    # Two have ended and three go on: more than it has slots now, so it takes no other.
    wait_for(ready=3, running=3, cancelled=2)

    assert f"from 1 to {MOST}" in set_slots(control, MOST + 1)["error"]
    assert "SIGTERM" in set_slots(control, 0)["error"]
    wait_for(ready=3, running=3, cancelled=2)
    stack.client.cancel_many(group_id=group)
    wait_for(cancelled=8)
