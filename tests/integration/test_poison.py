"""Rollouts whose worker ends under them, against a real Redis: the culprit pays, its neighbours do not."""

from __future__ import annotations

import pytest

from rollout.schema import State
from services.settings import Settings
from services.state import keys
from services.state.rollouts.store import Finish, RolloutStore
from tests.helpers.dying_fleet import DyingFleet
from tests.integration.conftest import emptied

client = emptied


@pytest.fixture
def store(client, server):
    return RolloutStore(client, Settings(redis_url=server.url))


@pytest.mark.parametrize("repeatable", [True, False])
def test_a_rollout_that_ends_three_workers_is_ended_and_its_neighbours_lose_nothing(
    client, store, repeatable
):
    fleet, neighbours = DyingFleet(client, store, repeatable), [f"n{number}" for number in range(20)]
    fleet.submit("poison", *neighbours)
    deaths = fleet.live_out("poison", neighbours)
    poison = store.get("poison")
    assert (poison.state, poison.error.type) == (State.FAILED, "WorkerLost")
    assert (poison.error.blame, poison.drop, poison.reward) == ("handler", True, None)
    assert "run2" in poison.error.message, "whoever reads it knows where to look"
    assert deaths == 3
    items = [store.get(id_) for id_ in neighbours]
    assert {item.state for item in items} == {State.COMPLETED}
    # Without a log it is another attempt, which is not counted against those that a rollout may have.
    assert {item.attempt for item in items} == {1 if repeatable else 3}
    assert not client.exists(keys.SUSPECTS), "nothing is kept of workers that are gone"


def test_a_takeover_costs_no_attempt_and_the_second_without_a_turn_does(client, store):
    fleet = DyingFleet(client, store, repeatable=True)
    fleet.submit("poison")
    course = []
    for _ in range(3):
        fleet.carry(["poison"])
        fleet.die()
        item = store.get("poison")
        course.append((item.state, item.attempt, item.resumed))
    assert course == [(State.RUNNING, 1, 1), (State.QUEUED, 2, 1), (State.FAILED, 2, 1)]


def test_a_rollout_that_makes_turns_may_see_any_number_of_workers_end(client, store):
    fleet = DyingFleet(client, store, repeatable=True)
    fleet.submit("long")
    for turn in range(5):
        (claim,) = fleet.carry(["long"])
        assert len(claim.turns) == turn
        fleet.turn(claim)
        fleet.die()
    item = store.get("long")
    assert (item.state, item.attempt, item.resumed) == (State.RUNNING, 1, 5)
    assert [note.text for note in item.notes][-1] == (
        "worker run4 was lost in state running: another one goes on at its turn"
    )


def test_what_made_a_turn_is_no_suspect_any_more(client, store):
    fleet = DyingFleet(client, store, repeatable=True)
    fleet.submit("a", "b")
    for _ in range(2):
        assert len(fleet.carry(["a", "b"])) == 2
        fleet.die()
    (claim,) = fleet.carry(["a", "b"])
    assert fleet.carry(["b"]) == []
    fleet.turn(claim)
    assert len(fleet.carry(["b"])) == 1


def test_a_rollout_that_waits_for_its_next_worker_is_cancelled_at_once(client, store):
    fleet = DyingFleet(client, store, repeatable=True)
    fleet.submit("one")
    (claim,) = fleet.carry(["one"])
    fleet.turn(claim)
    fleet.die()
    assert store.cancel("one")[:2] == ("cancelled", "cancelled")
    assert client.keys("*:turns:*") == [] and store.heartbeat([("one", claim.fence)]) == ["lost"]


def test_what_a_worker_without_a_log_held_begins_anew(client, store):
    """One of the release before, which wrote no stamp."""
    fleet = DyingFleet(client, store, repeatable=True)
    fleet.submit("one")
    fleet.carry(["one"])
    client.hset(keys.record("one"), "stamp", "")
    fleet.die()
    item = store.get("one")
    assert (item.state, item.attempt, item.resumed) == (State.QUEUED, 2, 0)


def test_one_that_may_be_tried_once_is_not_tried_again(client, store):
    fleet = DyingFleet(client, store)
    fleet.submit("once", max_attempts=1)
    fleet.carry(["once"])
    fleet.die()
    item = store.get("once")
    assert (item.state, item.error.blame, item.drop, item.reward) == (
        State.FAILED,
        "infrastructure",
        True,
        None,
    )
    assert "run0" in item.error.message, "whoever reads it knows where to look"


def test_those_that_saw_two_workers_end_are_carried_one_at_a_time(client, store):
    fleet, ids = DyingFleet(client, store), [f"r{number}" for number in range(5)]
    fleet.submit(*ids)
    for held in (5, 5):
        assert len(fleet.carry(ids)) == held
        fleet.die()
    (first,) = fleet.carry(ids)
    rest = [id_ for id_ in ids if id_ != first.rollout_id]
    assert fleet.carry(rest) == [] and {store.get(id_).state for id_ in rest} == {State.READY}
    assert store.finish(first, Finish(State.EVALUATING)) == State.EVALUATING
    (second,) = fleet.carry(rest)
    assert second.rollout_id != first.rollout_id
    record = client.hgetall(keys.record(first.rollout_id))
    assert "deaths" not in record, "it went through the stage in which it saw them end"


def test_what_another_worker_carries_does_not_keep_a_suspect_waiting(client, store):
    fleet = DyingFleet(client, store)
    fleet.submit("a", "b")
    for _ in range(2):
        assert len(fleet.carry(["a", "b"])) == 2
        fleet.die()
    assert len(fleet.carry(["a", "b"])) == 1
    fleet.worker = "another"
    (waiting,) = (id_ for id_ in ("a", "b") if store.get(id_).state is State.READY)
    assert len(fleet.carry([waiting])) == 1


def test_what_has_seen_no_worker_end_does_not_make_room_for_another_suspect(client, store):
    fleet = DyingFleet(client, store)
    fleet.submit("b", "c")
    for _ in range(2):
        assert len(fleet.carry(["b", "c"])) == 2
        fleet.die()
    fleet.submit("a")
    (harmless,) = fleet.carry(["a"])
    client.hset(keys.record("a"), mapping={"deaths": 1, "deaths_in": "run"})
    assert [claim.rollout_id for claim in fleet.carry(["b", "c"])] == ["b"]
    assert store.finish(harmless, Finish(State.EVALUATING)) == State.EVALUATING
    assert fleet.carry(["c"]) == []


def test_a_claim_repeated_after_an_outage_still_holds_its_rollout(client, store):
    """Its answer was lost with Redis, and its lease ran out before Redis was back."""
    fleet = DyingFleet(client, store)
    fleet.submit("one")
    first = store.claim_next("init@n", node="n", token="t")
    client.hset(keys.record("one"), "lease", 0)
    client.zadd(keys.DUE, {"one": 0})
    again = store.claim_next("init@n", node="n", token="t")
    assert (again.rollout_id, again.fence) == ("one", first.fence)
    assert store.overdue() == [] and store.get("one").attempt == 1
