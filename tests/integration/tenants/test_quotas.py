"""Quotas: live rollouts, submissions a minute."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from rollout.schema import Stage, State
from services.state import keys as names
from services.state.rollouts.store import Finish
from services.state.tenants import Tenant


def end(world, rollout_id, how):
    """Bring a rollout to one of its ends, each by another way through the script."""
    store = world.gate.rollouts
    if how == "cancelled while it waits":
        return store.cancel(rollout_id)
    if how == "past its deadline":
        world.redis.hset(names.record(rollout_id), "deadline", 1)
        world.redis.zadd(names.DUE, {rollout_id: 1})
        return store.overdue()
    if how == "its worker lost for the last time":
        return lose_workers(world, rollout_id)
    claim = store.claim(rollout_id, 1, Stage.INIT, "w")
    if how == "cancelled at work":
        store.cancel(rollout_id)
    return store.finish(claim, Finish(State.FAILED if how == "failed" else State.READY))


def lose_workers(world, rollout_id):
    """Worker after worker, until the rollout has no attempt left; each but the last keeps its place."""
    store, record = world.gate.rollouts, names.record(rollout_id)
    for attempt in range(1, 10):
        live = world.tenants.live("a")
        store.claim(rollout_id, attempt, Stage.INIT, f"w{attempt}")
        world.redis.hset(record, "lease", 1)
        world.redis.zadd(names.DUE, {rollout_id: 1})
        ended = store.overdue()
        if store.state(rollout_id).terminal:
            assert attempt == 3, "what ends three workers is ended"
            assert "it ends workers" in world.redis.hget(record, "drop_reason")
            return ended
        assert world.tenants.live("a") == live
    raise AssertionError("it never ended")


@pytest.mark.parametrize(
    "how",
    [
        "cancelled while it waits",
        "cancelled at work",
        "past its deadline",
        "its worker lost for the last time",
        "failed",
    ],
)
def test_every_end_gives_its_place_in_the_quota_back_once(world, how):
    world.key("a")
    world.tenants.set(Tenant(name="a", quota_live=3))
    made = [rollout["id"] for rollout in world.submit("a", n=3).json["rollouts"]]
    refused = world.submit("a")
    assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
    assert "3 live rollouts, has 3" in refused.json["detail"]
    end(world, made[0], how)
    assert world.gate.rollouts.state(made[0]).terminal
    end(world, made[0], "cancelled while it waits")
    assert world.tenants.live("a") == 2
    assert world.submit("a").status_code == 202
    assert world.submit("a").status_code == 429
    assert world.get("/v1/status", "a").json["tenant"]["live"] == 3


def test_attempts_and_hand_backs_keep_their_place(world):
    world.key("a")
    (made,) = world.submit("a").json["rollouts"]
    store = world.gate.rollouts
    for attempt, outcome in ((1, "handback"), (1, "again")):
        store.finish(store.claim(made["id"], attempt, Stage.INIT, "w"), Finish(outcome))
        assert world.tenants.live("a") == 1


def test_a_repeated_submission_takes_no_place_and_is_never_over_quota(world):
    world.key("a")
    world.tenants.set(Tenant(name="a", quota_live=2, per_minute=2))
    for _ in range(3):
        assert world.submit("a", id="g", n=2).status_code == 202
    assert world.tenants.live("a") == 2


def test_submissions_at_the_same_time_do_not_go_past_the_quota(world):
    world.key("a")
    world.tenants.set(Tenant(name="a", quota_live=7))
    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda _: world.submit("a").status_code, range(24)))
    assert sorted(codes) == [202] * 7 + [429] * 17
    assert world.tenants.live("a") == 7 == world.gate.rollouts.counts()["queued"]


def test_a_call_larger_than_the_quota_is_not_told_to_wait(world):
    world.key("a")
    for limits in ({"quota_live": 4}, {"per_minute": 4}, {"quota_live": 0}, {"per_minute": 0}):
        world.tenants.set(Tenant(name="a", **limits))
        answer = world.submit("a", n=5)
        assert answer.status_code == 403 and "Retry-After" not in answer.headers
        assert "this call holds 5" in answer.json["detail"]
    assert world.tenants.live("a") == 0


def test_submissions_a_minute_are_bounded_and_come_back_with_time(world):
    world.key("a")
    world.key("b")
    world.tenants.set(Tenant(name="a", per_minute=60))
    assert world.submit("a", n=60).status_code == 202
    refused = world.submit("a", n=60)
    assert refused.status_code == 429 and 1 <= int(refused.headers["Retry-After"]) <= 60
    assert world.submit("b", n=60).status_code == 202
    assert 0 < world.redis.pttl("tenant:a:bucket") <= 60_000, "a full one needs no key"
    # A minute later, without the wait.
    world.redis.hincrby("tenant:a:bucket", "at", -60_000)
    assert world.submit("a", n=60).status_code == 202
    assert world.submit("a", n=60).status_code == 429


def test_what_a_tenant_leaves_of_a_minute_is_not_saved_up(world):
    world.key("a")
    world.tenants.set(Tenant(name="a", per_minute=60))
    assert world.submit("a", n=10).status_code == 202
    world.redis.hincrby("tenant:a:bucket", "at", -50_000)
    assert world.submit("a", n=60).status_code == 202
    # Of the 40 that would be saved up, so that no slow machine earns them anew.
    assert world.submit("a", n=40).status_code == 429


def test_a_thousand_rollouts_are_a_call_and_one_more_is_refused(world):
    world.key("a")
    assert world.submit("a", n=1001).status_code == 400
    for more, status in ((1, 400), (0, 202)):
        requests = [{"handler": "noop", "n": 500}, {"handler": "noop", "n": 500 + more}]
        answer = world.post("/v1/rollouts", "a", {"requests": requests})
        assert answer.status_code == status, answer.json
    assert len(answer.json["rollouts"]) == 1000 == world.tenants.live("a")
