"""Redis is away for a while: live rollouts lose nothing by it, in whatever stage they are."""

from __future__ import annotations

import json
import signal
import threading
import time

import httpx
import pytest

from rollout.schema import RolloutRequest, State, new_id
from services.launch.demo import TASKS_FILE, load_tasks
from tests.chaos.harness import PATIENCE_S, STAGES
from tests.helpers.keys import HEADERS
from tests.helpers.long_forms import CHAOS
from tests.helpers.sandboxes import leftovers
from tests.helpers.stack import wait_until

AWAY_S = CHAOS("seconds that Redis is away", short=(2.0, 8.0), long=(2.0, 15.0, 60.0))
"""Less and more than a lease, which is 3 s here."""
EACH = 10
COUNT = CHAOS("rollouts in an outage", short=30, long=60)
FAULT_S = CHAOS("seconds of an outage for sandboxes and calls", short=6.0, long=AWAY_S[-1])


@pytest.fixture
def at_work(chaos):
    """Rollouts in every stage, whose gates are shut; those of RUN end theirs during the outage."""
    by_stage = {}
    for stage in STAGES:
        ids, gates = chaos.submit_up_to(stage, EACH)
        chaos.wait_for_arrived(gates, stage, EACH)
        by_stage[stage] = ids, gates
    return by_stage


def open_all(at_work):
    for _, gates in at_work.values():
        for stage in STAGES:
            (gates / stage).touch()


def require_unharmed(chaos, at_work):
    everybody = [rollout_id for ids, _ in at_work.values() for rollout_id in ids]
    chaos.require_exact(everybody)
    for rollout_id in everybody:
        item = chaos.client.get(rollout_id, include="summary")
        assert (item.state, item.attempt, item.error, item.reward) == (State.COMPLETED, 1, None, 1.0), item


@pytest.mark.parametrize("away_s", AWAY_S)
def test_redis_away_costs_live_rollouts_nothing(chaos, at_work, away_s):
    """Half of the rollouts go on from stage to stage while it is away, and must write that."""
    chaos.redis.crash()
    began = time.monotonic()
    open_all(dict(list(at_work.items())[:2]))
    time.sleep(max(0.0, away_s - (time.monotonic() - began)))  # the fault itself
    chaos.redis = chaos.redis.restarted()
    open_all(at_work)
    require_unharmed(chaos, at_work)


def test_a_redis_that_stands_still_costs_live_rollouts_nothing(chaos, at_work):
    """Others are on their way from stage to stage as it stops."""
    at_work["on their way"] = chaos.submit(5 * EACH), chaos.gates()
    chaos.redis.popen.send_signal(signal.SIGSTOP)
    try:
        time.sleep(FAULT_S / 2)  # the fault itself
        open_all(dict(list(at_work.items())[:2]))
        time.sleep(FAULT_S / 2)
    finally:
        chaos.redis.popen.send_signal(signal.SIGCONT)
    open_all(at_work)
    require_unharmed(chaos, at_work)


def test_sandboxes_and_model_calls_go_on_through_an_outage(chaos, embedded):
    """What uses Redis within a stage: the note of a sandbox in INIT, placement before each turn, …"""
    chaos.client.add_backend(embedded.url)
    requests = [
        RolloutRequest(handler="calculator", task=task, id=new_id()) for task in load_tasks(TASKS_FILE, COUNT)
    ]
    chaos.client.submit(requests)
    ids = [request.id for request in requests]
    for _ in range(3):
        wait_until(lambda: chaos.states(ids)["running"] or chaos.all_ended(ids), PATIENCE_S, "one in RUN")
        chaos.redis.crash()
        time.sleep(2.0)  # the fault itself
        chaos.redis = chaos.redis.restarted()
    chaos.wait_for_ends(ids)
    for rollout_id in ids:
        item = chaos.client.get(rollout_id, include="summary")
        notes = [note.text for note in item.notes]
        assert (item.state, item.attempt, item.error) == (State.COMPLETED, 1, None), notes
    wait_until(lambda: leftovers(chaos.sandbox_dir) == [], PATIENCE_S, "the sandboxes to be gone")


def test_the_gateway_says_503_with_retry_after_and_those_who_wait_go_on(chaos):
    gates = chaos.gates()
    (rollout_id,) = chaos.submit(1, gates)
    answers = {}

    def long_poll():
        answers["poll"] = httpx.get(
            f"{chaos.url}/v1/rollouts/{rollout_id}?wait=40", headers=HEADERS, timeout=PATIENCE_S
        )

    def stream():
        url = f"{chaos.url}/v1/results/stream?cursor=0-0"
        with httpx.stream("GET", url, headers=HEADERS, timeout=PATIENCE_S) as answer:
            for line in answer.iter_lines():
                if line.startswith("data:") and rollout_id in line:
                    answers["stream"] = json.loads(line.removeprefix("data:"))
                    return

    waiting = [threading.Thread(target=call) for call in (long_poll, stream)]
    for thread in waiting:
        thread.start()
    chaos.wait_for_arrived(gates, "init", 1)
    time.sleep(1.5)  # for both requests to be parked: nothing shows that from outside
    chaos.redis.crash()
    time.sleep(2.5)  # the fault itself; longer than the reader of completions asks at once
    body = {"requests": [{"handler": "gated", "id": f"late-{rollout_id}"}]}
    refused = httpx.post(f"{chaos.url}/v1/rollouts", json=body, headers=HEADERS, timeout=PATIENCE_S)
    assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1
    assert httpx.get(f"{chaos.url}/health", timeout=PATIENCE_S).status_code == 200
    chaos.redis = chaos.redis.restarted()
    for stage in STAGES:
        (gates / stage).touch()
    for thread in waiting:
        thread.join(PATIENCE_S)
    assert answers["poll"].status_code == 200 and answers["poll"].json()["state"] == "completed"
    assert answers["stream"]
    chaos.require_exact([rollout_id])
