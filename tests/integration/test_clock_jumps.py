"""Redis' clock goes back: whose times are moved along with it, and whose are right already."""

from __future__ import annotations

import os

import pytest

from rollout.schema import RolloutRequest, Stage
from services.settings import Settings
from services.state import keys
from services.state.redis import connect
from services.state.rollouts import store as rollouts
from services.state.rollouts.store import NewRollout, RolloutStore
from tests.helpers.chores import services
from tests.helpers.stack import RedisServer
from tests.helpers.wrong_clock import WrongClock
from workers.chores.reaper import Reaper

HOURS_S = 2 * 3600.0
DEADLINE_S = 10 * 3600.0
LEASE_S = 30.0
SLACK_MS = 10_000
WITHIN_S = 60.0
"""How long ago a reaper's clock may have jumped: longer than a test takes on a slow machine."""


@pytest.fixture
def clock(tmp_path_factory):
    return WrongClock(tmp_path_factory.mktemp("clock"))


@pytest.fixture
def reaper(tmp_path, clock):
    server = RedisServer(tmp_path, env={**os.environ, **clock.env})
    settings = Settings(redis_url=server.url, lease_s=LEASE_S)
    client = connect(server.url)
    store = RolloutStore(client, settings)
    yield Reaper(services(client, settings, "reaper", store=store))
    server.stop()


@pytest.fixture
def store(reaper):
    return reaper._store


def submit(store, *ids):
    request = RolloutRequest(handler="noop", limits={"deadline_s": DEADLINE_S})
    body = request.model_dump_json()
    store.submit([NewRollout(id_, id_, 0, request, body, "digest") for id_ in ids])


def left_ms(store, rollout_id):
    """Until its deadline, by Redis' clock."""
    seconds, _ = store._redis.time()
    return int(store._redis.hget(keys.record(rollout_id), "deadline")) - seconds * 1000


def test_those_submitted_since_it_went_back_keep_their_whole_deadline(reaper, store, clock):
    submit(store, "old")
    reaper._steadiness.look()
    clock.set(-HOURS_S)
    submit(store, "new", "begun")
    store.claim("begun", 1, Stage.INIT, "worker")
    reaper.clock_jumped(reaper._steadiness.look(), WITHIN_S)
    for id_ in ("old", "new", "begun"):
        assert left_ms(store, id_) == pytest.approx(DEADLINE_S * 1000, abs=SLACK_MS), id_
    # A second reaper that saw the same, a little later.
    reaper.clock_jumped(-HOURS_S, 2.0)
    for id_ in ("old", "new", "begun"):
        assert left_ms(store, id_) == pytest.approx(DEADLINE_S * 1000, abs=SLACK_MS), id_


def test_those_of_the_hour_that_comes_again_are_known_for_old_ones(reaper, store, clock):
    """They were submitted at the very time, by the clock, to which it goes back."""
    submit(store, "waits", "runs")
    clock.set(HOURS_S)  # the time that they take
    store.claim("runs", 1, Stage.INIT, "worker")
    store._redis.zadd(keys.DUE, {"waits": 0})
    reaper.tick()  # rings for it
    reaper._steadiness.look()
    clock.set(0)
    submit(store, "new")
    reaper.clock_jumped(reaper._steadiness.look(), WITHIN_S)
    assert left_ms(store, "new") == pytest.approx(DEADLINE_S * 1000, abs=SLACK_MS)
    for id_ in ("waits", "runs"):
        rest_ms = left_ms(store, id_)
        assert rest_ms == pytest.approx((DEADLINE_S - HOURS_S) * 1000, abs=SLACK_MS), id_
        seconds, _ = store._redis.time()
        assert store._redis.zscore(keys.DUE, id_) <= (seconds + LEASE_S) * 1000 + SLACK_MS


@pytest.mark.parametrize("hours_s", [HOURS_S, -HOURS_S], ids=["forward", "back"])
@pytest.mark.parametrize("died", [False, True], ids=["", "the first reaper died on its way"])
def test_one_submitted_since_and_rung_for_is_not_moved_by_a_second_reaper(
    reaper, store, clock, monkeypatch, hours_s, died
):
    submit(store, "old", "old2")
    clock.set(hours_s)
    submit(store, "early")
    if died:
        once = store._jump
        monkeypatch.setattr(rollouts, "MOVED_AT_ONCE", 1)
        monkeypatch.setattr(store, "_jump", lambda *args, **ask: once(*args, **ask) and 0)
    reaper.clock_jumped(hours_s, WITHIN_S)
    monkeypatch.undo()
    if not died:
        submit(store, "late")
    for id_ in ("early", "late")[: 2 - died]:
        store._redis.zadd(keys.DUE, {id_: 0})
    assert not any(entry.action == "ended" for entry in store.overdue())
    reaper.clock_jumped(hours_s, 40.0)
    for id_ in ("old", "old2", "early", "late")[: 4 - died]:
        assert left_ms(store, id_) == pytest.approx(DEADLINE_S * 1000, abs=SLACK_MS), id_


@pytest.mark.parametrize("hours_s", [HOURS_S, -HOURS_S], ids=["forward", "back"])
def test_all_times_of_an_old_rollout_move_along_and_no_lease_outlives_a_jump_back(server, hours_s):
    client = connect(server.url)
    client.flushall()
    store = RolloutStore(client, Settings(redis_url=server.url, lease_s=LEASE_S))
    submit(store, "one")
    store.claim("one", 1, Stage.INIT, "worker")
    record, now = keys.record("one"), client.time()[0] * 1000
    times = {name: now + place for place, name in enumerate(MOVED)}
    client.hset(record, mapping=times | {"created": 1, "lease": now + 8 * 3600_000})
    client.zadd(keys.DUE, {"one": now + 8 * 3600_000})
    store.jumped(hours_s, 1.0)
    moved = client.hmget(record, *MOVED)
    assert list(map(int, moved)) == [at + hours_s * 1000 for at in times.values()]
    for at in (float(client.hget(record, "lease")), client.zscore(keys.DUE, "one")):
        assert now < at <= now + LEASE_S * 1000 + SLACK_MS


MOVED = ("deadline", "since", "claimed", "cancel", "elsewhere_since")


def test_a_jump_is_dealt_with_by_who_sees_it_and_once_however_late_others_do(reaper, store, clock):
    """The elected one may have died with it, and the next may have come after it."""
    store._redis.set(keys.REAPER_LOCK, "dead", px=600_000)
    early, late = others = [Reaper(services(store._redis, store._settings, name)) for name in ("a", "b")]
    submit(store, "one")
    for peer in others:
        peer.turn()
    for jump in (1, 2, 3):
        clock.set(jump * HOURS_S)
        early.turn()
        assert left_ms(store, "one") == pytest.approx(DEADLINE_S * 1000, abs=SLACK_MS)
        if jump != 2:  # it stands still meanwhile, and sees both at once
            late.turn()
        assert left_ms(store, "one") == pytest.approx(DEADLINE_S * 1000, abs=SLACK_MS)
