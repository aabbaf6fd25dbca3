"""Rollouts whose worker ends under them, against a real Redis: the culprit pays, its neighbours do not."""

from __future__ import annotations

import pytest

from rollout.schema import RolloutRequest, Stage, State
from services.settings import Settings
from services.state import keys
from services.state.redis import connect
from services.state.rollouts import Claim, Finish, NewRollout, RolloutStore


@pytest.fixture
def client(server):
    client = connect(server.url)
    client.flushall()
    return client


@pytest.fixture
def store(client, server):
    return RolloutStore(client, Settings(redis_url=server.url))


class Fleet:
    """Workers of RUN that end whenever they carry the poison, over and over."""

    def __init__(self, client, store, slots=100):
        self.client, self.store, self.slots = client, store, slots
        self.number = 0
        self.worker = "run0"

    def submit(self, *ids, **limits):
        request = RolloutRequest(handler="noop", limits=limits)
        body = request.model_dump_json()
        self.store.submit([NewRollout(one, one, 0, request, body, "digest") for one in ids])

    def claim(self, rollout_id, stage):
        attempt = self.store.get(rollout_id).attempt
        if stage is Stage.INIT:
            return self.store.claim(rollout_id, attempt, stage, "init@n")
        return self.store.claim(rollout_id, attempt, stage, self.worker)

    def carry(self, ids):
        """All that can be carried into RUN by the one worker there is."""
        held = []
        for one in ids:
            if self.store.get(one).state is State.QUEUED:
                claim = self.claim(one, Stage.INIT)
                assert isinstance(claim, Claim), claim
                assert self.store.finish(claim, Finish(State.READY)) == State.READY
            claim = self.claim(one, Stage.RUN)
            if isinstance(claim, Claim):
                held.append(claim)
            else:
                assert claim == "crowded"
        return held

    def die(self):
        """SIGKILL: the leases of all that it held run out."""
        for one in self.client.zrange(keys.by_state("running"), 0, -1):
            self.client.hset(keys.record(one), "lease", 0)
            self.client.zadd(keys.DUE, {one: 0})
        self.store.overdue(1000)
        self.number += 1
        self.worker = f"run{self.number}"

    def live_out(self, poison, neighbours):
        """Rounds of carrying until everything has ended; how often a worker ended."""
        everybody = [poison, *neighbours]
        for _ in range(50):
            live = [one for one in everybody if not self.store.get(one).state.terminal]
            if not live:
                return self.number
            held = self.carry(live)
            if any(claim.rollout_id == poison for claim in held):
                self.die()
                continue
            for claim in held:
                assert self.store.finish(claim, Finish(State.EVALUATING)) == State.EVALUATING
                claim = self.claim(claim.rollout_id, Stage.EVAL)
                assert self.store.finish(claim, Finish(State.COMPLETED, {"reward": "1.0"})) == State.COMPLETED
        raise AssertionError("it never ends")


def test_a_rollout_that_ends_its_worker_again_and_again_fails_and_its_neighbours_do_not(client, store):
    fleet, neighbours = Fleet(client, store), [f"n{number}" for number in range(20)]
    fleet.submit("poison", *neighbours)
    deaths = fleet.live_out("poison", neighbours)
    poison = store.get("poison")
    assert (poison.state, poison.error.type) == (State.FAILED, "WorkerLost")
    assert deaths == 2 + 3, "two are free, then each costs one of three attempts"
    assert {store.get(one).state for one in neighbours} == {State.COMPLETED}


def test_one_that_may_be_tried_once_is_not_tried_again(client, store):
    fleet = Fleet(client, store)
    fleet.submit("once", max_attempts=1)
    fleet.carry(["once"])
    fleet.die()
    assert store.get("once").state is State.FAILED


def test_those_that_saw_two_workers_end_are_carried_one_at_a_time(client, store):
    fleet, ids = Fleet(client, store), [f"r{number}" for number in range(5)]
    fleet.submit(*ids)
    for held in (5, 5):
        assert len(fleet.carry(ids)) == held
        fleet.die()
    (first,) = fleet.carry(ids)
    rest = [one for one in ids if one != first.rollout_id]
    assert fleet.carry(rest) == [] and {store.get(one).state for one in rest} == {State.READY}
    assert store.finish(first, Finish(State.EVALUATING)) == State.EVALUATING
    (second,) = fleet.carry(rest)
    assert second.rollout_id != first.rollout_id
    record = client.hgetall(keys.record(first.rollout_id))
    assert "deaths" not in record, "it went through the stage in which it saw them end"


def test_what_another_worker_carries_does_not_keep_a_suspect_waiting(client, store):
    fleet = Fleet(client, store)
    fleet.submit("a", "b")
    for _ in range(2):
        assert len(fleet.carry(["a", "b"])) == 2
        fleet.die()
    assert len(fleet.carry(["a", "b"])) == 1
    fleet.worker = "another"
    (waiting,) = (one for one in ("a", "b") if store.get(one).state is State.READY)
    assert len(fleet.carry([waiting])) == 1


def test_a_claim_repeated_after_an_outage_still_holds_its_rollout(client, store):
    """Its answer was lost with Redis, and its lease ran out before Redis was back."""
    fleet = Fleet(client, store)
    fleet.submit("one")
    first = store.claim_next("one", 1, "init@n", node="n", token="t")
    client.hset(keys.record("one"), "lease", 0)
    client.zadd(keys.DUE, {"one": 0})
    again = store.claim_next("one", 1, "init@n", node="n", token="t")
    assert (again.rollout_id, again.fence) == ("one", first.fence)
    assert store.overdue() == [] and store.get("one").attempt == 1
