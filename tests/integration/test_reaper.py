"""The reaper against a real Redis: who is elected, and how much one look deals with."""

from __future__ import annotations

import pytest

from rollout.schema import RolloutRequest, Stage
from services.settings import Settings
from services.state import keys
from services.state.fleet import FleetStore
from services.state.redis import connect
from services.state.rollouts import NewRollout
from tests.helpers.chores import services
from tests.helpers.stack import RedisServer, wait_until
from workers.chores.reaper import AT_ONCE, Reaper


@pytest.fixture
def server(tmp_path):
    server = RedisServer(tmp_path)
    yield server
    server.stop()


def reaper_of(server, owner, **settings):
    settings = Settings(redis_url=server.url, **settings)
    client = connect(server.url)
    parts = services(client, settings, owner)
    return Reaper(parts), parts.store


def test_a_dead_reaper_s_lock_is_gone_before_the_leases_of_the_dead_worker(server):
    dead, _ = reaper_of(server, "dead", lease_s=4.0, reaper_interval_s=0.2)
    other, _ = reaper_of(server, "other", lease_s=4.0, reaper_interval_s=0.2)
    assert dead.election.won() and not other.election.won()
    assert 0 < server.client.pttl(keys.REAPER_LOCK) <= 2000
    wait_until(other.election.won, 60, "the other one to be elected")
    assert not dead.election.won()


def test_one_look_deals_with_all_rollouts_of_a_dead_worker(server):
    reaper, store = reaper_of(server, "reaper", lease_s=0.05)
    request = RolloutRequest(handler="noop")
    count = 2 * AT_ONCE + 50
    ids = [f"r{number}" for number in range(count)]
    store.submit([NewRollout(one, one, 0, request, request.model_dump_json(), "digest") for one in ids])
    for one in ids:
        assert not isinstance(store.claim(one, 1, Stage.INIT, "dead"), str)
    wait_until(
        lambda: server.client.zcount("rollouts:due", "-inf", _now(server)) == count,
        60,
        "the leases to run out",
    )
    reaper.tick()
    assert {store.get(one).attempt for one in ids} == {2}
    assert server.client.llen("init") == count


def _now(server):
    seconds, micros = server.client.time()
    return seconds * 1000 + micros // 1000


def test_where_the_clock_went_back_what_is_dead_does_not_live_for_hours(server):
    """Its times are ahead of now, and so is the end of its lock."""
    server.client.set(keys.REAPER_LOCK, "dead", px=7_200_000)
    reaper, _ = reaper_of(server, "reaper", lease_s=4.0, reaper_interval_s=0.2)
    assert not reaper.election.won()
    assert 0 < server.client.pttl(keys.REAPER_LOCK) <= 2000
    fleet = FleetStore(server.client)
    server.client.zadd(keys.workers("run"), {"dead": _now(server) / 1000 + 7200})
    fleet.announce("living", ["run"])
    assert server.client.zscore(keys.workers("run"), "dead") <= _now(server) / 1000 + 1
