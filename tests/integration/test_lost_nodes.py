"""Rollouts that wait for a node which is gone, against a real Redis."""

from __future__ import annotations

import json
import time

import pytest

from rollout.schema import RolloutRequest, Stage, State
from services.settings import Settings
from services.state import keys
from services.state.fleet import FleetStore
from services.state.redis import connect
from services.state.rollouts.store import Finish, NewRollout, RolloutStore
from tests.helpers.chores import Clock, services
from workers.chores.reaper import Reaper

_BOX = {"id": "s1", "runtime": "apptainer", "image": "base", "node": "lost", "isolation_missing": []}
SANDBOX = json.dumps({"record": _BOX, "socket": "/tmp/s"})


@pytest.fixture(autouse=True)
def nothing_left(server):
    server.client.flushall()


@pytest.fixture
def store(server):
    return RolloutStore(connect(server.url), Settings(redis_url=server.url))


def ready(store, rollout_id, node="lost", max_attempts=3):
    """A rollout that INIT has begun on a node, and RUN has not taken."""
    request = RolloutRequest(handler="noop", limits={"max_attempts": max_attempts})
    store.submit([NewRollout(rollout_id, rollout_id, 0, request, request.model_dump_json(), "digest")])
    claim = store.claim_next(f"init@{node}", node=node)
    assert claim.rollout_id == rollout_id
    store.note(rollout_id, claim.fence, {"sandbox": SANDBOX, "node": node})
    assert store.finish(claim, Finish(State.READY)) == State.READY


def waits_for_eval(store, rollout_id, **kwargs):
    ready(store, rollout_id, **kwargs)
    claim = store.claim(rollout_id, 1, Stage.RUN, "run@lost")
    assert store.finish(claim, Finish(State.EVALUATING)) == State.EVALUATING


def passed_on(store, rollout_id, **kwargs):
    """One whose RUN a stopping worker of the node has handed over, and nobody has taken."""
    ready(store, rollout_id, **kwargs)
    claim = store.claim(rollout_id, 1, Stage.RUN, "run@lost")
    assert store.finish(claim, Finish("passed on")) == State.RUNNING


def test_what_waits_for_a_node_that_ended_in_order_begins_anew_without_using_up_an_attempt(store, server):
    ready(store, "ready", max_attempts=1)
    waits_for_eval(store, "evaluating", max_attempts=1)
    passed_on(store, "running", max_attempts=1)
    held = "held"
    ready(store, held)
    store.claim(held, 1, Stage.RUN, "run@lost")
    ready(store, "elsewhere", node="other")
    given_back = store.vacate(["lost"], lost=False)
    assert {(entry.action, entry.rollout_id, entry.attempt) for entry in given_back} == {
        ("restart", "ready", 1),
        ("restart", "evaluating", 1),
        ("restart", "running", 1),
    }
    assert store.get(held).state is State.RUNNING, "its worker may live"
    for rollout_id in ("ready", "evaluating", "running"):
        record = store.get(rollout_id)
        assert (record.state, record.attempt, record.sandbox) == (State.QUEUED, 1, None)
        assert "handed back: node lost ends" in [note.text for note in record.notes]
        again = store.claim_next("init@other", node="other")
        assert again.node is None and again.sandbox is None
    assert store.get("elsewhere").state is State.READY
    assert store.ahead("lost") == (0, 0)
    assert store.vacate(["lost"], lost=False) == []


def test_a_lost_node_costs_an_attempt_and_a_message_of_the_old_one_counts_no_more(store):
    ready(store, "one")
    assert [(item.action, item.attempt) for item in store.vacate(["lost"], lost=True)] == [("restart", 2)]
    assert store.claim("one", 1, Stage.RUN, "run@lost") == "stale"
    assert store.claim_next("init@other", node="other").attempt == 2


def test_a_lost_node_ends_what_has_no_attempt_left_and_gives_no_reward(store):
    ready(store, "last", max_attempts=1)
    assert [(item.action, item.node) for item in store.vacate(["lost"], lost=True)] == [("ended", "lost")]
    record = store.get("last")
    assert (record.state, record.reward, record.drop) == (State.FAILED, None, True)
    assert (record.error.blame.value, record.error.type) == ("infrastructure", "NodeLost")


def test_what_a_worker_holds_is_its_own_until_its_lease_runs_out(store):
    ready(store, "held")
    claim = store.claim("held", 1, Stage.RUN, "run@lost")
    assert store.vacate(["lost"], lost=True) == []
    assert store.finish(claim, Finish(State.EVALUATING)) == State.EVALUATING


@pytest.fixture
def watch(server, store, monkeypatch):
    """A reaper whose clock we move, and its Redis as seen by a worker of node `lost` that speaks no more."""
    clock = Clock()
    monkeypatch.setattr("workers.chores.reaper.time", clock)
    settings = Settings(redis_url=server.url)
    client = connect(server.url)
    client.hset(keys.NODES, "lost", json.dumps({"at": time.time() - 60.0, "sandboxes": {}}))
    return Reaper(services(client, settings, "reaper")), clock


def look(reaper, clock, times, every_s=6.0):
    for _ in range(times):
        reaper.tick()
        clock.now += every_s


def test_the_reaper_takes_from_a_silent_node_once_all_had_the_time_to_speak(watch, store, server):
    ready(store, "one")
    look(*watch, 5)
    assert store.get("one").state is State.READY
    look(*watch, 3)
    assert (store.get("one").state, store.get("one").attempt) == (State.QUEUED, 2)
    assert server.client.llen("init") == 1


@pytest.mark.parametrize("why", ["the reaper stood still", "it speaks", "its sandbox host alone is silent"])
def test_a_node_that_only_seems_silent_is_not_lost(watch, store, server, why):
    ready(store, "one")
    if why == "it speaks":
        server.client.hset(keys.NODES, "lost", json.dumps({"at": time.time() + 3600.0, "sandboxes": {}}))
    for _ in range(10):
        if why == "its sandbox host alone is silent":
            words = json.dumps({"at": time.time(), "node": "lost", "slots": 1})
            server.client.hset(keys.FLEET_SLOTS, "run@lost", words)
        # 20 s is longer than between two looks.
        look(*watch, 1, 20.0 if why == "the reaper stood still" else 6.0)
    assert store.get("one").state is State.READY


def test_leases_that_ran_out_while_redis_was_away_may_be_extended_first(server, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("workers.chores.reaper.time", clock)
    settings = Settings(redis_url=server.url, lease_s=0.05)
    client = connect(server.url)
    store = RolloutStore(client, settings)
    reaper = Reaper(services(client, settings, "reaper"))
    request = RolloutRequest(handler="noop")
    store.submit([NewRollout("one", "one", 0, request, request.model_dump_json(), "digest")])
    claim = store.claim("one", 1, Stage.INIT, "worker")
    time.sleep(0.1)  # the lease is over by Redis' clock
    reaper.redis_was_away()
    reaper.tick()
    assert store.get("one").attempt == 1
    patient = RolloutStore(client, Settings(redis_url=server.url, lease_s=60.0))
    assert patient.heartbeat([("one", claim.fence)]) == ["ok"]
    clock.now += 60.0
    reaper.tick()
    assert store.get("one").attempt == 1


def test_a_node_long_silent_is_forgotten_with_its_queues(server):
    client = connect(server.url)
    now = time.time()
    last_signs = {"long": now - 4000.0, "lately": now - 100.0, "here": now}
    client.hset(
        keys.NODES, mapping={name: json.dumps({"at": at, "sandboxes": {}}) for name, at in last_signs.items()}
    )
    for name in last_signs:
        client.lpush(f"run.{name}", "message")
        client.sadd(f"_kombu.binding.run.{name}", "binding")
    assert FleetStore(client).lost_nodes(30.0) == ["lately", "long"]
    assert FleetStore(client).lost_nodes(30.0) == ["lately"]
    assert sorted(client.keys("*run.*")) == sorted(
        name for node in ("lately", "here") for name in (f"run.{node}", f"_kombu.binding.run.{node}")
    )
