"""The reaper against a real Redis: who is elected, and how much one look deals with."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from rollout.schema import RolloutRequest, Stage, State
from services.settings import Settings
from services.state import keys
from services.state.election import Election
from services.state.fleet import ALIVE_S, FleetStore
from services.state.redis import connect
from services.state.rollouts.store import Finish, NewRollout
from tests.helpers.chores import services
from tests.helpers.stack import wait_until
from workers.chores.reaper import AT_ONCE, Reaper

_BOX = {"id": "s", "runtime": "r", "image": "i", "node": "n", "isolation_missing": []}
SANDBOX = json.dumps({"record": _BOX, "socket": "/s"})


@pytest.fixture(autouse=True)
def nothing_left(server):
    server.client.flushall()


@pytest.fixture
def long_lock(monkeypatch):
    """Settings whose lock lasts for half a lease, which is minutes."""
    monkeypatch.setattr("workers.chores.reaper.LOCK_S", 1000.0)
    return {"lease_s": 240.0, "reaper_interval_s": 0.2}


def reaper_of(server, owner, **settings):
    settings = Settings(redis_url=server.url, **settings)
    client = connect(server.url)
    parts = services(client, settings, owner)
    return Reaper(parts), parts.store


def submit(store, *ids):
    request = RolloutRequest(handler="noop")
    body = request.model_dump_json()
    store.submit([NewRollout(rollout_id, rollout_id, 0, request, body, "digest") for rollout_id in ids])


def test_a_dead_reaper_s_lock_is_gone_before_the_leases_of_the_dead_worker(server, long_lock):
    dead, successor = (reaper_of(server, name, **long_lock)[0] for name in ("dead", "other"))
    assert dead.election.won() and not successor.election.won()
    assert 0 < server.client.pttl(keys.REAPER_LOCK) <= 120_000
    server.client.pexpire(keys.REAPER_LOCK, 200)
    wait_until(successor.election.won, 120, "the other one to be elected")
    assert not dead.election.won()


class Notes:
    """Stands for the dispatcher: notes what is sent, and what is to be cleaned up."""

    def __init__(self):
        self.sent, self.cleaned = [], []

    def send(self, stage, ref):
        # A message for INIT names no rollout.
        self.sent.append("init" if stage == "init" else (stage, ref["id"], ref["attempt"], ref["node"]))

    def clean_up(self, rollout_id, node, attempt):
        self.cleaned.append((rollout_id, node, attempt))


@pytest.mark.parametrize(
    ("stage", "field", "sent", "cleaned"),
    [
        (Stage.RUN, "lease", ["init"], [("one", "n", 1)]),
        (Stage.EVAL, "lease", [("eval", "one", 2, "n")], []),
        (Stage.RUN, "deadline", [], [("one", "n", 1)]),
    ],
)
def test_a_lost_rollout_begins_anywhere_and_its_sandbox_ends_where_it_is(server, stage, field, sent, cleaned):
    reaper, store = reaper_of(server, "reaper")
    reaper._dispatcher = notes = Notes()
    submit(store, "one")
    for before, entered in ((Stage.INIT, "ready"), (Stage.RUN, "evaluating"))[: list(Stage).index(stage)]:
        claim = store.claim("one", 1, before, "w")
        store.note("one", claim.fence, {"sandbox": SANDBOX, "node": "n"})
        store.finish(claim, Finish(entered))
    store.claim("one", 1, stage, "w")
    server.client.hset(keys.record("one"), mapping={"lease": 1, field: 1})
    server.client.zadd(keys.DUE, {"one": 1})
    reaper.tick()
    assert (notes.sent, notes.cleaned) == (sent, cleaned)


@pytest.mark.parametrize(
    ("outcome", "state", "attempt", "cleaned"),
    [
        (Finish(State.COMPLETED, {"reward": "0.5"}), State.COMPLETED, 1, [("one", "n", 1)]),
        (Finish("again", {"blame": "sandbox"}, delay_s=0.0), State.QUEUED, 2, [("one", "n", 1)]),
        (Finish("handback"), State.EVALUATING, 2, []),
    ],
)
def test_what_a_worker_had_decided_stands_when_it_is_lost_before_it_could_say_so(
    server, outcome, state, attempt, cleaned
):
    """It has perhaps released the sandbox: the stage cannot be done again."""
    reaper, store = reaper_of(server, "reaper")
    reaper._dispatcher = notes = Notes()
    submit(store, "one")
    for stage, entered in ((Stage.INIT, "ready"), (Stage.RUN, "evaluating"), (Stage.EVAL, None)):
        claim = store.claim("one", 1, stage, "w")
        store.note("one", claim.fence, {"sandbox": SANDBOX, "node": "n"})
        if entered:
            store.finish(claim, Finish(entered))
    assert store.decide(claim, outcome)
    server.client.hset(keys.record("one"), "lease", 1)
    server.client.zadd(keys.DUE, {"one": 1})
    reaper.tick()
    item = store.get("one")
    assert (item.state, item.attempt, notes.cleaned) == (state, attempt, cleaned)
    assert item.reward == (0.5 if state is State.COMPLETED else None)
    assert not store.decide(replace(claim, fence=0), outcome), "it is somebody else's"
    if state is State.COMPLETED:
        assert store.finish(claim, outcome) == state, "it sleeps no longer, and hears of it"


@pytest.mark.parametrize("patient", [True, False])
def test_a_reaper_whose_watch_was_disturbed_judges_nobody(server, patient):
    reaper, store = reaper_of(server, "reaper", lease_s=30.0)
    submit(store, "one")
    store.claim("one", 1, Stage.INIT, "dead")
    server.client.hset(keys.record("one"), "lease", 1)
    server.client.zadd(keys.DUE, {"one": 1})
    if patient:
        reaper.redis_was_away()
    reaper.tick()
    assert store.get("one").attempt == (1 if patient else 2)


def test_only_the_elected_one_ticks_and_trims(server, monkeypatch):
    ticked = []
    for name in ("elected", "other"):
        reaper, store = reaper_of(server, name, lease_s=0.02)
        reaper._trimmed = float("-inf")
        monkeypatch.setattr(store, "trim", lambda name=name: ticked.append(name))
        for _ in range(4):
            time.sleep(0.05)
            reaper.turn()
    assert ticked == ["elected"], "once in ten minutes"


def test_one_look_deals_with_all_rollouts_of_a_dead_worker(server):
    reaper, store = reaper_of(server, "reaper", lease_s=0.05)
    ids = [f"r{number}" for number in range(2 * AT_ONCE + 50)]
    submit(store, *ids)
    for rollout_id in ids:
        assert not isinstance(store.claim(rollout_id, 1, Stage.INIT, "dead"), str)
    wait_until(
        lambda: server.client.zcount(keys.DUE, "-inf", _now(server)) == len(ids), 120, "the leases to end"
    )
    reaper.tick()
    assert {store.get(rollout_id).attempt for rollout_id in ids} == {2}
    assert server.client.llen("init") == len(ids)


def _now(server):
    seconds, micros = server.client.time()
    return seconds * 1000 + micros // 1000


def test_a_lock_is_resigned_by_its_holder_alone(server):
    holder, rival = (Election(server.client, keys.REAPER_LOCK, name, 1.0) for name in ("holder", "other"))
    assert holder.won() and not rival.won()
    rival.resign()
    assert not rival.won() and holder.won()
    holder.resign()
    assert rival.won()


def test_workers_that_died_long_ago_are_forgotten(server):
    fleet, now = FleetStore(server.client), _now(server) / 1000
    server.client.zadd(
        keys.workers("run"), {"long ago": now - 100 * ALIVE_S - 1, "lately": now - ALIVE_S - 1}
    )
    server.client.hset(keys.FLEET_SLOTS, mapping=dict.fromkeys(("long ago", "lately"), "{}"))
    fleet.announce("living", ["run"])
    assert server.client.zrange(keys.workers("run"), 0, -1) == ["lately", "living"]
    there = {name for name in ("long ago", "lately") if server.client.hexists(keys.FLEET_SLOTS, name)}
    assert there == {"lately"}
    assert fleet.alive()["run"] == ["living"]


def test_where_the_clock_went_back_what_is_dead_does_not_live_for_hours(server, long_lock):
    """Its times are ahead of now, and so is the end of its lock."""
    server.client.set(keys.REAPER_LOCK, "dead", px=7_200_000)
    reaper, _ = reaper_of(server, "reaper", **long_lock)
    assert not reaper.election.won()
    assert 0 < server.client.pttl(keys.REAPER_LOCK) <= 120_000
    fleet = FleetStore(server.client)
    server.client.zadd(keys.workers("run"), {"dead": _now(server) / 1000 + 7200})
    fleet.announce("living", ["run"])
    assert server.client.zscore(keys.workers("run"), "dead") <= _now(server) / 1000 + 1
