"""The Lua that owns every change of state, on a real Redis without workers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from rollout.schema import RolloutRequest, Stage, State
from services.dispatch import _expand
from services.settings import Settings
from services.state.redis import connect
from services.state.rollouts import TRANSITIONS, Finish, RolloutStore


@pytest.fixture
def client(server):
    client = connect(server.url)
    client.flushall()
    return client


@pytest.fixture
def store(client, server):
    return RolloutStore(client, Settings(redis_url=server.url, lease_s=30))


def submit(store, **fields):
    new = _expand(RolloutRequest(handler="noop", **fields))
    store.submit(new)
    return new[0].id


def claimed(store, stage, rollout_id, attempt=1):
    claim = store.claim(rollout_id, attempt, stage, "w")
    assert not isinstance(claim, str), claim
    return claim


def test_every_state_has_its_row_and_the_ends_have_no_way_out():
    assert set(TRANSITIONS) == set(State)
    for state, following in TRANSITIONS.items():
        assert state.terminal == (not following)
        assert following <= set(State)


def test_the_whole_way_through(store):
    rollout_id = submit(store, task={"a": 1}, tags=["t"])
    for stage, entered in ((Stage.INIT, State.READY), (Stage.RUN, State.EVALUATING)):
        assert store.finish(claimed(store, stage, rollout_id), Finish(entered)) == entered
    last = claimed(store, Stage.EVAL, rollout_id)
    assert store.finish(last, Finish(State.COMPLETED, {"reward": "0.5"})) == State.COMPLETED
    item = store.get(rollout_id)
    assert item.reward == 0.5 and item.finished_at is not None
    assert [event.fence for event in item.timeline] == [0, 1, 1, 2, 2, 3, 3]
    assert store.counts() == {**{state.value: 0 for state in State}, "completed": 1}
    assert store.claim(rollout_id, 1, Stage.EVAL, "w") == "ended"


def test_a_transition_outside_the_table_is_refused_and_changes_nothing(store):
    rollout_id = submit(store)
    claim = claimed(store, Stage.INIT, rollout_id)
    with pytest.raises(redis.ResponseError, match="no transition from initializing to completed"):
        store.finish(claim, Finish(State.COMPLETED, {"reward": "1.0"}))
    item = store.get(rollout_id)
    assert item.state is State.INITIALIZING and item.reward is None
    assert store.heartbeat([(rollout_id, claim.fence)]) == ["ok"], "it is still held"


def test_a_claim_and_a_finish_sent_twice_count_once(store):
    """As a client does that lost the connection before the answer came."""
    rollout_id = submit(store)
    first = store.claim(rollout_id, 1, Stage.INIT, "w", token="t")
    again = store.claim(rollout_id, 1, Stage.INIT, "w", token="t")
    assert (again.fence, again.request) == (first.fence, first.request)
    assert store.claim(rollout_id, 1, Stage.INIT, "w", token="other") == "stale"
    assert [store.finish(first, Finish(State.READY)) for _ in range(3)] == [State.READY] * 3
    run = claimed(store, Stage.RUN, rollout_id)
    assert [store.finish(run, Finish("again")) for _ in range(2)] == [State.QUEUED] * 2
    item = store.get(rollout_id)
    assert item.attempt == 2 and len(item.timeline) == 5
    assert store.totals()["retries"] == 1


def test_only_one_of_many_claims_wins(store):
    rollout_id = submit(store)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: store.claim(rollout_id, 1, Stage.INIT, f"w{n}"), range(64)))
    assert sum(not isinstance(answer, str) for answer in answers) == 1
    assert {answer for answer in answers if isinstance(answer, str)} == {"stale"}


@pytest.mark.parametrize(
    ("stage", "attempt", "word"),
    [(Stage.RUN, 1, "stale"), (Stage.EVAL, 1, "stale"), (Stage.INIT, 2, "stale")],
)
def test_a_message_of_another_stage_or_attempt_is_dropped(store, stage, attempt, word):
    assert store.claim(submit(store), attempt, stage, "w") == word
    assert store.claim("no-such", 1, Stage.INIT, "w") == "gone"


def test_an_old_fence_writes_nothing(client, store):
    rollout_id = submit(store)
    old = claimed(store, Stage.INIT, rollout_id)
    client.hset(f"rollout:{{{rollout_id}}}", "lease", 0)
    client.zadd("rollouts:due", {rollout_id: 0})
    (item,) = store.overdue()
    assert (item.action, item.attempt) == ("restart", 2)
    new = claimed(store, Stage.INIT, rollout_id, attempt=2)
    assert store.heartbeat([(rollout_id, old.fence), (rollout_id, new.fence)]) == ["lost", "ok"]
    assert store.finish(old, Finish(State.READY)) == "lost"
    assert store.note(rollout_id, old.fence, {"sandbox": "x"}) is False
    assert store.finish(new, Finish(State.READY)) == State.READY


def test_retries_end_with_the_attempts(store):
    rollout_id = submit(store, limits={"max_attempts": 2})
    error = {"error": "{}", "blame": "sandbox"}
    assert store.finish(claimed(store, Stage.INIT, rollout_id), Finish("again", error)) == State.QUEUED
    last = claimed(store, Stage.INIT, rollout_id, attempt=2)
    assert store.finish(last, Finish("again", error)) == State.FAILED
    assert store.totals()["retries"] == 1 and store.totals()["blame_sandbox"] == 1


def test_a_rollout_that_merely_waits_is_rung_for_ever_more_rarely(client, store):
    rollout_id = submit(store)
    waits = []
    for _ in range(3):
        client.zadd("rollouts:due", {rollout_id: 0})
        (item,) = store.overdue()
        assert (item.action, item.stage) == ("send", "init")
        seconds, micros = client.time()
        waits.append(client.zscore("rollouts:due", rollout_id) / 1000 - seconds - micros / 1e6)
    assert waits == pytest.approx([60, 120, 240], abs=2)
    assert store.overdue() == []


def test_a_cancel_flag_wins_over_the_next_stage_but_not_over_the_end(store):
    running = submit(store)
    claim = claimed(store, Stage.INIT, running)
    assert store.cancel(running)[0] == "cancelling"
    assert store.heartbeat([(running, claim.fence)]) == ["cancel"]
    assert store.finish(claim, Finish(State.READY)) == State.CANCELLED
    waiting = submit(store)
    assert store.cancel(waiting)[:2] == ("cancelled", "cancelled")
    assert store.cancel(waiting)[:2] == ("ended", "cancelled")
    assert store.cancel("no-such")[0] == "gone"


@pytest.mark.parametrize("outcome", ["again", "elsewhere"])
def test_a_cancelled_one_has_no_failure_whatever_its_stage_met_meanwhile(store, outcome):
    rollout_id = submit(store)
    claim = claimed(store, Stage.INIT, rollout_id)
    store.cancel(rollout_id)
    error = {"error": '{"blame": "sandbox", "type": "E", "message": "m"}', "blame": "sandbox"}
    assert store.finish(claim, Finish(outcome, error)) == State.CANCELLED
    item = store.get(rollout_id)
    assert (item.error, item.drop, item.drop_reason) == (None, True, "cancelled")
    assert "blame_sandbox" not in store.totals()


def test_records_of_ended_rollouts_expire(client, store):
    rollout_id = submit(store)
    store.cancel(rollout_id)
    assert 0 < client.ttl(f"rollout:{{{rollout_id}}}") <= 7 * 86400
    assert client.ttl(f"rollout:{{{submit(store)}}}") == -1, "a live one never does"
