"""Cancel: at once where nobody holds the rollout, within a second where somebody does."""

from __future__ import annotations

import re

import httpx
import pytest

from rollout.http import LONG_POLL_S
from rollout.schema import RolloutRequest, State
from services.state import keys
from services.state.rollouts.store import CANCEL_AT_ONCE
from tests.helpers.idle import in_time
from tests.helpers.sandboxes import leftovers
from tests.helpers.stack import wait_until

SOON_S, BUSY_S = 1.0, LONG_POLL_S - 1
"""At an idle service, and beside other tests: who is not woken asks again after a long poll."""
PATIENCE_S = 120


def in_state(client, rollout_id, state):
    wait_until(lambda: client.get(rollout_id, include="summary").state is state, PATIENCE_S, f"state {state}")


def test_cancel_of_a_running_tool_ends_it_at_once_and_kills_its_sandbox(stack, client):
    (new,) = client.submit(RolloutRequest(handler="in_tool", task={"command": "sleep 600"}))
    in_state(client, new.id, State.RUNNING)
    with in_time(SOON_S, BUSY_S):
        client.cancel(new.id)
        item = client.wait(new.id, timeout=240)
    assert item.state is State.CANCELLED and item.drop and item.reward is None
    wait_until(lambda: leftovers(stack.sandbox_dir) == [], PATIENCE_S, "the sandbox to be gone")


def test_cancel_in_a_model_call_ends_it_at_once_and_in_the_engine_too(client, embedded):
    """A paused engine holds the call for as long as we like."""

    gauge = re.compile(r"^vllm:num_requests_(?:running|waiting)\S* (\S+)$", re.MULTILINE)

    def at_work():
        text = httpx.get(f"{embedded.url}/metrics", timeout=PATIENCE_S).text
        return sum(map(float, gauge.findall(text)))

    httpx.post(f"{embedded.url}/pause?mode=keep", timeout=PATIENCE_S).raise_for_status()
    try:
        (new,) = client.submit(RolloutRequest(handler="digits", task={"digits": 10}))
        in_state(client, new.id, State.RUNNING)
        wait_until(lambda: at_work() == 1, PATIENCE_S, "the call to reach the engine")
        with in_time(SOON_S, BUSY_S):
            client.cancel(new.id)
            assert client.wait(new.id, timeout=240).state is State.CANCELLED
        wait_until(lambda: at_work() == 0, PATIENCE_S, "the engine to drop the call")
        assert client.backends()[0].load == 0.0
    finally:
        httpx.post(f"{embedded.url}/resume", timeout=PATIENCE_S)


@pytest.mark.parametrize("stage", ["init", "run", "eval"])
def test_cancel_reaches_every_stage(stack, client, stage):
    state = {"init": State.INITIALIZING, "run": State.RUNNING, "eval": State.EVALUATING}[stage]
    (new,) = client.submit(RolloutRequest(handler="noop", task={f"{stage}_s": 600.0}))
    in_state(client, new.id, state)
    with in_time(SOON_S, BUSY_S):
        client.cancel(new.id)
        assert client.wait(new.id, timeout=240).state is State.CANCELLED


def test_cancelling_twice_or_after_the_end_is_harmless_and_says_so(client):
    (item,) = client.run([RolloutRequest(handler="noop")])
    answer = client.cancel(item.id)
    assert answer["already_ended"] and answer["state"] == "completed"
    assert client.get(item.id).state is State.COMPLETED


def test_ids_that_are_unknown_are_named_in_their_order(client):
    (item,) = client.run([RolloutRequest(handler="noop")])
    unknown = [f"nobody-{number}" for number in range(1500)]
    done = client.cancel_many([*unknown[:700], item.id, *unknown[700:]])
    assert done == {"cancelled": 0, "already_ended": 1, "unknown": 1500, "unknown_ids": unknown}


def test_thousands_are_cancelled_together_by_a_message_for_hundreds_of_them(stack, client):
    """Those that run and those that wait; of a rollout no more than its script and its own end."""
    count, slots = 2000, 64
    request = RolloutRequest(handler="noop", task={"run_s": 600.0}, tags=["t-many"], n=100)
    for _ in range(count // 100):
        client.submit(request)
    wait_until(lambda: client.status()["states"]["running"] >= slots, 120, "all slots to be taken")
    with stack.redis.client.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(keys.CANCEL_CHANNEL)
        channel.get_message(timeout=60.0)
        live = [state for state in State if not state.terminal]
        with in_time(SOON_S, BUSY_S):
            assert client.cancel_many(tag="t-many")["cancelled"] == count
            wait_until(lambda: not any(client.status()["states"][state] for state in live), 120, "all to end")
        messages = []
        while message := channel.get_message(timeout=1.0):
            messages.append(message["data"].split())
    assert len(messages) <= count / CANCEL_AT_ONCE and sum(map(len, messages)) >= slots
