"""INIT of one rollout after the other in one slot: a real process object on a real Redis, without Celery."""

from __future__ import annotations

import asyncio
import base64
import json
from types import SimpleNamespace

import pytest
from celery.exceptions import Ignore

from rollout.schema import Stage, State
from services.state import keys
from services.state.rollouts.store import Finish
from services.state.scripts import send_many
from tests.helpers.stage_worker import NODE, meanwhile, stage_worker
from workers import events
from workers.held import CANCEL, LOST, SHUTDOWN
from workers.init import init
from workers.sandboxes import owner_of
from workers.task import run_stage


@pytest.fixture
def worker(server, monkeypatch):
    with stage_worker(server, monkeypatch, [Stage.INIT]) as worker:
        yield worker


def slot_of_init(worker, body=init, rung=2, **fields):
    """What a slot of INIT answers where three rollouts wait (None: the chain ends), of which so many have
    messages beside its own; and their ids and states."""
    ids = [worker.submit(**fields) for _ in range(3)]
    worker.services.dispatcher.ring(rung)
    task = SimpleNamespace(request=SimpleNamespace(id="task", root_id="task"))
    try:
        ref = run_stage(task, Stage.INIT, body)
    except Ignore:
        ref = None
    assert not worker.process._held and not worker.process._claims and not worker.process.tasks
    return ref, ids, [worker.store.state(rollout_id) for rollout_id in ids]


def sent(worker):
    """The rollouts of RUN's messages, the first one first, and the chains that these belong to."""
    messages = [json.loads(raw) for raw in reversed(worker.redis.lrange("run", 0, -1))]
    refs = [json.loads(base64.b64decode(message["body"]))[0][0] for message in messages]
    assert all(ref["handler"] == "told" and ref["node"] is None for ref in refs)
    chains = [(message["headers"]["root_id"], message["headers"]["parent_id"]) for message in messages]
    return [ref["id"] for ref in refs], chains


def test_a_slot_of_init_goes_on_while_there_are_messages(worker, monkeypatch):
    told = []
    monkeypatch.setattr(events, "tell", lambda _, kind, task, **__: told.append((task, kind)))
    ref, ids, states = slot_of_init(worker)
    assert (ref, states, worker.redis.llen("init")) == (None, [State.READY] * 3, 0)
    begun, chains = sent(worker)
    assert begun == ids, "in the order in which they wait"
    assert chains[0] == ("task", "task") and all(root == parent for root, parent in chains)
    assert [kind for name, kind in told if name == "task"] == ["task-claimed", "task-succeeded"]
    of_each = ["task-received", "task-started", "task-claimed", "task-succeeded"]
    assert [[kind for name, kind in told if name == root] for root, _ in chains[1:]] == [of_each] * 2
    assert worker.store.get(ids[2]).metrics["of_init"] == 1.0


@pytest.mark.parametrize("rung", [0, 1])
def test_it_takes_no_more_rollouts_than_messages(worker, rung):
    _, ids, states = slot_of_init(worker, rung=rung)
    assert states == [State.READY] * (1 + rung) + [State.QUEUED] * (2 - rung)
    assert (sent(worker)[0], worker.redis.llen("init")) == (ids[: 1 + rung], 0)


def test_it_stays_within_the_bounds_and_leaves_the_message(worker, monkeypatch):
    monkeypatch.setattr(worker.process.admission, "bounds", lambda: (2, 2))
    assert slot_of_init(worker)[::2] == (None, [State.READY, State.READY, State.QUEUED])
    assert worker.redis.llen("init") == 1


@pytest.mark.parametrize("why", ["fewer slots", "a closed node", "no consumer", "several stages"])
def test_it_takes_nothing_that_its_worker_is_not_to_take(worker, why):
    process = worker.process

    async def body(run):
        if why == "fewer slots":
            process.services.slots = 0
        elif why == "a closed node":
            process.admission.stopped = {"disk": "none is left"}
        elif why == "no consumer":
            process.services.app.amqp.queues.deselect("init")
        else:
            process.services.stages.append(Stage.RUN)
        return Finish(State.READY)

    ref, ids, states = slot_of_init(worker, body)
    assert (ref["id"], states) == (ids[0], [State.READY, State.QUEUED, State.QUEUED])
    assert (worker.redis.llen("init"), worker.redis.llen("run")) == (2, 0), "Celery sends that one"


@pytest.mark.parametrize(
    ("what", "becomes"),
    [
        (CANCEL, State.CANCELLED),
        ("cancel unheard", State.CANCELLED),
        (SHUTDOWN, State.QUEUED),
        (LOST, State.QUEUED),
    ],
)
def test_what_happens_to_a_later_one_happens_to_it_alone(worker, what, becomes):
    of_second, begun = meanwhile(worker, what), []

    async def body(run):
        begun.append(run.claim.rollout_id)
        return await of_second(run) if len(begun) == 2 else Finish(State.READY)

    ref, ids, states = slot_of_init(worker, body)
    assert (ref, states) == (None, [State.READY, becomes, State.QUEUED])
    assert (sent(worker)[0], begun) == (ids[:1], ids[:2])
    assert set(worker.host.released) == (set() if what == LOST else {owner_of(ids[1], 1)})
    assert worker.redis.llen("init") == (2 if what == SHUTDOWN else 1)


def test_where_redis_is_full_the_outcome_is_entered_and_nothing_taken(worker):
    async def body(run):
        await asyncio.to_thread(worker.redis.config_set, "maxmemory", 1)
        return Finish(State.READY)

    try:
        ref, ids, states = slot_of_init(worker, body)
        assert (ref["id"], states) == (ids[0], [State.READY, State.QUEUED, State.QUEUED])
        assert worker.redis.llen("init") == 2
    finally:
        worker.redis.config_set("maxmemory", 0)


def test_who_got_no_answer_and_asks_again_gets_the_same_rollout_for_one_message(worker):
    first, second, _ = (worker.submit() for _ in range(3))
    worker.services.dispatcher.ring(2)
    turn = {"owner": "w", "node": NODE, "most_on_node": 9, "most_without_sandbox": 9}
    claim = worker.store.claim_next(**turn)
    queues = {"next_queue": "run", "queue": "init"}
    call = worker.store.go_on(claim, Finish(State.READY), b"message", **queues, **turn, token="once")
    for _ in range(2):
        (answer,) = send_many(worker.redis, [call])
        following = worker.store.went_on(answer)
        assert (following.rollout_id, following.fence) == (second, 1)
        assert worker.redis.llen("init") == 1
    assert worker.store.state(first) == State.READY
    late = worker.store.go_on(claim, Finish(State.READY), b"message", **queues, **turn, token="other")
    worker.redis.hset(keys.record(first), "fence", 7)
    worker.redis.hdel(keys.record(first), "ended_fence")
    assert send_many(worker.redis, [late]) == [{"word": "lost"}], "it takes nothing further"
