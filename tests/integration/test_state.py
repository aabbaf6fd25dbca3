"""The Lua that owns every change of state, on a real Redis without workers."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from rollout.schema import RolloutRequest, Stage, State
from rollout.trajectory import Trajectory
from services.dispatch import _expand
from services.settings import Settings
from services.state import keys
from services.state.rollouts.store import MAX_REQUEUE_S, TRANSITIONS, Finish, RolloutStore
from services.state.tenants import Tenant
from tests.integration.conftest import emptied

client = emptied


@pytest.fixture
def store(client, server):
    return RolloutStore(client, Settings(redis_url=server.url, lease_s=30))


def submit(store, tenant=None, **fields):
    new = _expand(RolloutRequest(handler="noop", **fields))
    store.submit(new, tenant)
    return new[0].id


def claimed(store, stage, rollout_id, attempt=1):
    claim = store.claim(rollout_id, attempt, stage, "w")
    assert not isinstance(claim, str), claim
    return claim


def now(client):
    """By Redis' clock, in milliseconds."""
    seconds, micros = client.time()
    return seconds * 1000 + micros // 1000


def pass_time(client, rollout_id, seconds):
    """The lease of a rollout that is held, and when the reaper looks at it, are so much nearer."""
    client.hincrby(keys.record(rollout_id), "lease", -1000 * seconds)
    client.zincrby(keys.DUE, -1000 * seconds, rollout_id)


def through(store, rollout_id, last, attempt=1):
    """Bring a rollout to its last claim, of EVAL, and end it so."""
    for stage, entered in ((Stage.INIT, State.READY), (Stage.RUN, State.EVALUATING)):
        assert store.finish(claimed(store, stage, rollout_id, attempt), Finish(entered)) == entered
    assert store.finish(claimed(store, Stage.EVAL, rollout_id, attempt), last) == last.next
    return store.get(rollout_id)


FAILURE = {
    "error": '{"blame": "sandbox", "type": "E", "message": "m"}',
    "blame": "sandbox",
    "drop": "1",
    "drop_reason": "sandbox: E",
    "finish_reason": "error",
    "policy_versions": '["v1"]',
}
_BOX = {"id": "s", "runtime": "r", "image": "i", "node": "n", "isolation_missing": []}
SANDBOX = json.dumps({"record": _BOX, "socket": "/s"})


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
    assert item.reward == 0.5 and item.finished_at is not None and item.lease_until is None
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


def test_a_claim_repeated_after_an_outage_holds_the_rollout_from_then_on(client, store):
    rollout_id = submit(store)
    first = store.claim(rollout_id, 1, Stage.INIT, "w", token="t")
    pass_time(client, rollout_id, 31)
    assert store.claim(rollout_id, 1, Stage.INIT, "w", token="t").fence == first.fence
    assert store.overdue() == [] and store.get(rollout_id).attempt == 1


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


@pytest.mark.parametrize("stage", [Stage.INIT, Stage.RUN, Stage.EVAL])
def test_another_attempt_has_nothing_of_the_one_that_failed(client, store, stage):
    rollout_id = submit(store)
    entered = {Stage.INIT: State.READY, Stage.RUN: State.EVALUATING}
    for before in list(Stage)[: list(Stage).index(stage)]:
        claim = claimed(store, before, rollout_id)
        store.note(rollout_id, claim.fence, {"sandbox": SANDBOX, "node": "n"})
        store.finish(claim, Finish(entered[before], trajectory=Trajectory(warnings=["old"])))
    claim = claimed(store, stage, rollout_id)
    failed = Finish("again", FAILURE, Trajectory(warnings=["old"]))
    assert store.finish(claim, failed) == State.QUEUED
    item = store.get(rollout_id)
    assert (item.attempt, item.trajectory, item.sandbox) == (2, None, None)
    client.zadd(keys.DUE, {rollout_id: 0})  # its delay is over
    assert [item.action for item in store.overdue()] == ["send"]
    again = store.claim_next("w", node="m")
    assert (again.error, again.finish_reason, again.sandbox, again.node) == (None, None, None, None)
    assert store.finish(again, Finish("handback")) == State.QUEUED
    item = through(store, rollout_id, Finish(State.COMPLETED, {"reward": "1.0"}), attempt=2)
    assert (item.state, item.reward, item.attempt) == (State.COMPLETED, 1.0, 2)
    assert (item.drop, item.drop_reason, item.error, item.finish_reason) == (False, None, None, None)
    assert item.policy_versions == [] and item.trajectory is None
    assert client.hget(keys.record(rollout_id), "blame") is None
    counted = {"retries": 1, "retry_sandbox": 1, "attempts_2": 1}
    assert store.totals() == counted, "no drop and no blame"


@pytest.mark.parametrize("lost", [True, False])
def test_what_a_node_left_is_nothing_to_the_next_one(client, store, lost):
    rollout_id = submit(store)
    claim = claimed(store, Stage.INIT, rollout_id)
    store.note(rollout_id, claim.fence, {"sandbox": SANDBOX, "node": "n"})
    store.finish(claim, Finish(State.READY))
    failed = Finish(State.EVALUATING, FAILURE, Trajectory(warnings=["old"]))
    store.finish(claimed(store, Stage.RUN, rollout_id), failed)
    (item,) = store.vacate(["n"], lost=lost)
    assert (item.action, item.attempt, item.stage, item.node) == ("restart", 1 + lost, "init", "n")
    item = store.get(rollout_id)
    assert (item.state, item.trajectory, item.sandbox) == (State.QUEUED, None, None)
    item = through(store, rollout_id, Finish(State.COMPLETED, {"reward": "1.0"}), attempt=1 + lost)
    assert (item.drop, item.drop_reason, item.error, item.policy_versions) == (False, None, None, [])


def test_a_heartbeat_keeps_a_rollout_for_a_lease_from_then_and_no_longer(client, store):
    rollout_id = submit(store)
    claim = claimed(store, Stage.INIT, rollout_id)
    for _ in range(3):
        pass_time(client, rollout_id, 20)
        began = now(client)
        assert store.heartbeat([(rollout_id, claim.fence)]) == ["ok"]
        lease = float(client.hget(keys.record(rollout_id), "lease"))
        assert lease == client.zscore(keys.DUE, rollout_id) == store.get(rollout_id).lease_until * 1000
        assert began <= lease - 30_000 <= now(client)
        assert store.overdue() == []
    assert store.get(rollout_id).attempt == 1, "60 s with a lease of 30"
    pass_time(client, rollout_id, 31)
    assert [(item.action, item.attempt) for item in store.overdue()] == [("restart", 2)]
    assert store.heartbeat([(rollout_id, claim.fence)]) == ["lost"]


@pytest.mark.parametrize("stop", ["cancel", "deadline"])
def test_a_heartbeat_of_who_ignores_its_end_holds_for_the_patience_alone(client, server, stop):
    store = RolloutStore(client, Settings(redis_url=server.url, lease_s=1000, stop_patience_s=60))
    rollout_id = submit(store)
    claim = claimed(store, Stage.INIT, rollout_id)
    now = client.time()[0] * 1000
    if stop == "cancel":
        assert store.cancel(rollout_id)[0] == "cancelling"
        client.hset(keys.record(rollout_id), "cancel", now - 50_000)
        assert store.cancel(rollout_id)[0] == "cancelling"  # asked twice, it begins once
    else:
        client.hset(keys.record(rollout_id), "deadline", now - 50_000)
    assert store.heartbeat([(rollout_id, claim.fence)]) == ["cancel" if stop == "cancel" else "overdue"]
    assert client.zscore(keys.DUE, rollout_id) == pytest.approx(now + 10_000, abs=1000)
    pass_time(client, rollout_id, 15)
    assert [item.action for item in store.overdue()] == ["ended"]
    item = store.get(rollout_id)
    expected = {
        "cancel": (State.CANCELLED, True, "cancelled", "cancelled"),
        "deadline": (State.TIMED_OUT, True, "deadline", "time_limit"),
    }
    assert (item.state, item.drop, item.drop_reason, item.finish_reason) == expected[stop]
    assert store.totals()[f"drop_{item.drop_reason}"] == 1


def test_a_claim_past_the_deadline_is_the_reapers(client, store):
    rollout_id = submit(store)
    client.hset(keys.record(rollout_id), "deadline", client.time()[0] * 1000)
    assert store.claim(rollout_id, 1, Stage.INIT, "w") == "overdue"
    assert [item.action for item in store.overdue()] == ["ended"], "at once, not when it would be rung for"
    assert store.get(rollout_id).state is State.TIMED_OUT


def test_what_this_worker_cannot_do_waits_longer_each_time_and_fails_when_nobody_could(client, server):
    store = RolloutStore(client, Settings(redis_url=server.url, lease_s=30, handler_wait_s=600))
    rollout_id = submit(store)
    record = keys.record(rollout_id)

    def elsewhere():
        claim = claimed(store, Stage.INIT, rollout_id)
        return store.finish(claim, Finish("elsewhere", FAILURE, delay_s=5))

    for wait_s in (5, 10, 20, 30):
        began = now(client)
        assert elsewhere() == State.QUEUED and store.get(rollout_id).error is None
        assert began <= client.zscore(keys.DUE, rollout_id) - 1000 * wait_s <= now(client)
    # A stage that goes well forgets it, and so do all that follow.
    store.finish(claimed(store, Stage.INIT, rollout_id), Finish(State.READY))
    assert client.hmget(record, "elsewhere", "elsewhere_since") == [None, None]
    store.finish(claimed(store, Stage.RUN, rollout_id), Finish("handback"))
    assert elsewhere() == State.QUEUED
    client.hincrby(record, "elsewhere_since", -570_000)
    assert elsewhere() == State.QUEUED
    client.hincrby(record, "elsewhere_since", -30_000)
    assert elsewhere() == State.FAILED and client.zscore(keys.DUE, rollout_id) is None
    item = store.get(rollout_id)
    assert (item.attempt, item.error.type, item.drop) == (1, "E", True)


def test_a_rollout_that_merely_waits_is_rung_for_ever_more_rarely(client, store):
    rollout_id = submit(store)

    def rings(*waits_s):
        for wait_s in waits_s:
            client.zadd("rollouts:due", {rollout_id: 0})
            began = now(client)
            (item,) = store.overdue()
            assert (item.action, item.stage) == ("send", "init")
            assert began <= client.zscore("rollouts:due", rollout_id) - 1000 * wait_s <= now(client)

    rings(60, 120, 240, 480, MAX_REQUEUE_S, MAX_REQUEUE_S)
    assert store.overdue() == []
    store.finish(claimed(store, Stage.INIT, rollout_id), Finish("handback"))
    rings(60, 120)  # it waits anew


def test_time_in_a_queue_is_counted_from_when_it_began_to_wait(client, store):
    began = now(client)
    rollout_id = submit(store)
    record = keys.record(rollout_id)
    client.hincrby(record, "since", -10_000)
    claim = claimed(store, Stage.INIT, rollout_id)
    client.hincrby(record, "claimed", -20_000)
    store.finish(claim, Finish(State.READY))
    client.hincrby(record, "since", -1_000)
    claimed(store, Stage.RUN, rollout_id)
    spent = store.get(rollout_id).stage_seconds
    took_s = (now(client) - began) / 1000
    assert 11 <= spent["queued"] <= 11 + took_s and 20 <= spent["init"] <= 20 + took_s


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


def test_a_cancel_reaches_the_named_tenants_rollouts_alone(store):
    waiting, held = (submit(store, Tenant(name="a")) for _ in range(2))
    claim = claimed(store, Stage.INIT, held)
    assert [word for word, *_ in store.cancel_many([waiting, held], "b")] == ["gone", "gone"]
    assert store.state(waiting) is State.QUEUED
    assert store.heartbeat([(held, claim.fence)]) == ["ok"]
    assert [word for word, *_ in store.cancel_many([waiting, held], "a")] == ["cancelled", "cancelling"]
    assert store.cancel(submit(store), "default")[0] == "cancelled"


def test_a_known_id_is_nobody_elses_and_has_one_body(store):
    rollout_id = submit(store, Tenant(name="a"), id="mine", task={"a": 1})
    for tenant, task, word in (("a", 1, "queued"), ("a", 2, "conflict"), ("b", 1, "conflict")):
        new = _expand(RolloutRequest(handler="noop", id="mine", task={"a": task}))
        assert store.submit(new, Tenant(name=tenant)) == [word]
    assert store.get(rollout_id).request.task == {"a": 1}


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


def test_all_that_an_ended_rollout_leaves_expires_with_it(client, store):
    rollout_id = submit(store)
    assert client.ttl(keys.record(rollout_id)) == -1, "a live one never does"
    through(store, rollout_id, Finish(State.COMPLETED, {"reward": "1.0"}, Trajectory()))
    own = [name for name in client.scan_iter() if "{" in name]
    kinds = {name.partition(":")[0] + name.partition("}")[2] for name in own}
    assert kinds == {"rollout", "rollout:timeline", "rollout:trajectory", "group", "request"}
    assert all(0 < client.ttl(name) <= 7 * 86400 for name in own), own


def test_a_claim_is_noted_for_its_repetition_and_not_for_ever(client, store):
    submit(store)
    store.claim_next("w", node="n", token="t")
    assert 0 < client.pttl(keys.fair_claim("t")) <= 150_000, "the lease and an outage"


def test_the_stream_of_changes_is_bounded(client, store):
    client.eval("for i = 1, 100500 do redis.call('XADD', 'events', '*', 'k', i) end", 0)
    store.finish(claimed(store, Stage.INIT, submit(store)), Finish(State.READY))
    assert client.xlen(keys.EVENTS) < 100_500
