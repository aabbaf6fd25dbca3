"""A real Redis whose memory is full: what ends work or frees memory goes on, what brings more does not."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import redis
from celery.exceptions import Ignore

from rollout.schema import RolloutRequest, Stage, State
from rollout.trajectory import Chain, Segment, Trajectory
from services.gateway.app import create_app
from services.settings import Settings
from services.state import keys
from services.state.fleet import FleetStore
from services.state.memory import COPIES, REFUSE_AT, Room, StoreFull
from services.state.redis import connect
from services.state.results.store import ResultStore
from services.state.rollouts.store import Finish, NewRollout, RolloutStore
from tests.helpers.chores import services
from tests.helpers.keys import keyed
from tests.helpers.stack import wait_until
from workers import patience
from workers import task as task_module
from workers.chores.reaper import Reaper
from workers.held import Held
from workers.stage import StageRun

LARGE = Trajectory(chains=[Chain(segments=[Segment(role="assistant", token_ids=list(range(200_000)))])])
"""About a megabyte as stored."""


@pytest.fixture
def client(server):
    client = connect(server.url)
    client.config_set("maxmemory", 0)
    client.flushall()
    yield client
    client.config_set("maxmemory", 0)


def settings(server, **more):
    return Settings(redis_url=server.url, **more)


@pytest.fixture
def store(client, server):
    return RolloutStore(client, settings(server))


def submit(store, *ids):
    request = RolloutRequest(handler="noop")
    body = request.model_dump_json()
    store.submit([NewRollout(id_, id_, 0, request, body, "digest") for id_ in ids])


def claimed(store, rollout_id, stage=Stage.INIT):
    return store.claim(rollout_id, store.get(rollout_id).attempt, stage, "worker@n")


def through(store, rollout_id, trajectory=LARGE):
    """A whole rollout, with its result."""
    assert store.finish(claimed(store, rollout_id), Finish(State.READY)) == State.READY
    run = claimed(store, rollout_id, Stage.RUN)
    assert store.finish(run, Finish(State.EVALUATING, {}, trajectory)) == State.EVALUATING
    assert store.finish(claimed(store, rollout_id, Stage.EVAL), Finish(State.COMPLETED)) == State.COMPLETED


def fill(client):
    """Let there be less memory than is used, by a little less than a result takes."""

    def full():
        # What connections hold counts, too, and goes when Redis pleases.
        client.connection_pool.disconnect()
        client.config_set("maxmemory", client.info("memory")["used_memory"] - 300_000)
        time.sleep(0.1)
        try:
            client.set("more", "x" * 1000)
        except redis.OutOfMemoryError:
            return True

    wait_until(full, 120, "Redis to be full")


def test_the_reaper_is_elected_sweeps_and_ends_what_is_over_though_redis_is_full(client, store, server):
    submit(store, "acked", "dead")
    through(store, "acked")
    claimed(store, "dead")
    # Never freed as long as there is room.
    results = ResultStore(client, settings(server, keep_acked_s=3600.0))
    assert results.acknowledge(["acked"]) == ["acknowledged"] and results.sweep() == []
    client.hset(keys.record("dead"), mapping={"lease": 0, "deadline": 1})
    client.zadd(keys.DUE, {"dead": 0})
    fill(client)
    config = settings(server, keep_acked_s=3600.0, reaper_interval_s=0.1)
    reaper = Reaper(services(client, config, "reaper"))
    assert reaper.election.won()
    reaper.tick()
    assert store.get("dead").state is State.TIMED_OUT
    assert client.exists(keys.trajectory("acked")) == 0
    client.set("more", "x" * 1000)  # there is room again


def test_what_is_under_way_lives_on_and_ends_though_redis_is_full(client, store, server):
    submit(store, "held", "waits", "evaluated", "done", "cancelled")
    held = claimed(store, "held")
    assert store.finish(claimed(store, "waits"), Finish(State.READY)) == State.READY
    through(store, "done", None)
    claim = claimed(store, "evaluated")
    store.finish(claim, Finish(State.READY))
    store.finish(claimed(store, "evaluated", Stage.RUN), Finish(State.EVALUATING, {}, LARGE))
    fill(client)
    fleet = FleetStore(client)
    fleet.announce("run@n", ["run"], "n", slots=8)
    fleet.put_node("n", {"claimed": 1})
    assert fleet.alive()["run"] == ["run@n"] and fleet.lost_nodes(0.5) == []
    assert store.heartbeat([("held", held.fence)]) == ["ok"]
    assert store.note("held", held.fence, {"node": "n"}) is True
    assert store.finish(held, Finish(State.FAILED)) == State.FAILED
    assert store.cancel("cancelled")[0] == "cancelled"
    assert ResultStore(client, settings(server)).acknowledge(["done"]) == ["acknowledged"]
    scored = claimed(store, "evaluated", Stage.EVAL)
    assert store.finish(scored, Finish(State.COMPLETED, {"reward": "1.0"})) == State.COMPLETED
    assert store.get("evaluated").reward == 1.0
    assert claimed(store, "waits", Stage.RUN).rollout_id == "waits"


def test_a_result_waits_for_room_and_is_not_lost(client, store, monkeypatch):
    monkeypatch.setattr(patience, "RETRY_S", 0.05)
    submit(store, "one")
    store.finish(claimed(store, "one"), Finish(State.READY))
    claim = claimed(store, "one", Stage.RUN)
    fill(client)
    outcome, entered = Finish(State.EVALUATING, {}, LARGE), []
    with pytest.raises(redis.OutOfMemoryError):
        store.finish(claim, outcome)
    writer = threading.Thread(
        target=lambda: entered.append(patience.wait_for(lambda: store.finish(claim, outcome)))
    )
    writer.start()
    time.sleep(0.5)
    assert not entered and store.heartbeat([("one", claim.fence)]) == ["ok"]
    client.config_set("maxmemory", 0)
    writer.join(30)
    assert entered == [State.EVALUATING]
    assert claimed(store, "one", Stage.EVAL).trajectory() == LARGE


@pytest.fixture
def stopping():
    return threading.Event()


@pytest.fixture
def finishing(store, stopping, monkeypatch):
    """A thread of a worker whose RUN has just ended; by itself nothing waits longer than 0.2 s."""
    monkeypatch.setattr(patience, "PATIENCE_S", 0.2)
    monkeypatch.setattr(patience, "RETRY_S", 0.05)

    def start(claim):
        held = Held(claim.rollout_id, Stage.RUN, claim.fence, time.monotonic() + claim.deadline_in_s)
        process = SimpleNamespace(
            settings=Settings(),
            store=store,
            host=None,
            let_go=lambda held: let_go.append(held.rollout_id),
            stopping=stopping,
            consumer=None,
        )
        run = StageRun(process, held, claim)

        def finish():
            with contextlib.suppress(Ignore):
                task_module._end(process, "task", run, Finish(State.EVALUATING, {}, LARGE))

        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        return thread

    let_go: list[str] = []
    yield start, let_go


def test_a_finished_stage_waits_for_room_as_long_as_its_rollout_has(client, store, finishing):
    start, let_go = finishing
    submit(store, "one")
    store.finish(claimed(store, "one"), Finish(State.READY))
    claim = claimed(store, "one", Stage.RUN)
    fill(client)
    thread = start(claim)
    time.sleep(2.0)  # ten times as long as anything else waits for
    assert not let_go and store.get("one").state is State.RUNNING
    client.config_set("maxmemory", 0)
    thread.join(30)
    assert let_go == ["one"] and store.get("one").state is State.EVALUATING
    assert claimed(store, "one", Stage.EVAL).trajectory() == LARGE


def test_a_finished_stage_keeps_its_slot_no_longer_than_its_rollout_has(client, store, finishing):
    start, let_go = finishing
    submit(store, "over", "away")
    for id_ in ("over", "away"):
        store.finish(claimed(store, id_), Finish(State.READY))
    over, away = (claimed(store, id_, Stage.RUN) for id_ in ("over", "away"))
    client.hset(keys.record("over"), mapping={"lease": 0, "deadline": 1})
    client.zadd(keys.DUE, {"over": 0})
    fill(client)
    thread = start(over)
    time.sleep(0.5)
    assert not let_go
    store.overdue()  # the reaper's: Redis answers though it is full, and says that nobody wants the outcome
    thread.join(30)
    assert let_go == ["over"] and store.get("over").state is State.TIMED_OUT
    store._do = Mock(side_effect=redis.ConnectionError("away"))
    began = time.monotonic()
    start(dataclasses.replace(away, deadline_in_s=1.0)).join(30)
    assert let_go == ["over", "away"]
    assert time.monotonic() - began > 1.0, "it waits for longer than is usual"


def test_a_finished_stage_does_not_keep_a_worker_that_stops(client, store, stopping, finishing, monkeypatch):
    """Celery waits for the thread; the rollout has hours."""
    monkeypatch.setattr(patience, "RETRY_S", 60.0)
    start, let_go = finishing
    submit(store, "one")
    store.finish(claimed(store, "one"), Finish(State.READY))
    claim = claimed(store, "one", Stage.RUN)
    fill(client)
    thread = start(claim)
    time.sleep(0.5)
    assert not let_go
    stopping.set()
    thread.join(20)
    assert let_go == ["one"] and store.get("one").state is State.RUNNING


def test_a_claim_does_not_keep_a_worker_that_stops(stopping):
    stopping.set()
    with pytest.raises(patience.RedisAway):
        patience.wait_for(Mock(side_effect=redis.ConnectionError("away")), stopping)


def test_new_work_is_refused_at_80_percent_and_what_is_under_way_goes_on(client, store, server):
    submit(store, "one")
    gateway = keyed(create_app(settings(server)))
    # So that what its clients and scripts take, a hundred kilobytes or two, changes nothing.
    client.setrange("filler", 20 << 20, "x")
    client.config_set("maxmemory", int(client.info("memory")["used_memory"] / (REFUSE_AT + 0.1)))
    for path, body in (
        ("/v1/rollouts", {"requests": [{"handler": "noop"}]}),
        ("/v1/batches", {"prompts": [{"handler": "noop"}], "groups": 1}),
    ):
        client.hset(keys.HANDLERS, "noop", '{"name": "noop"}')
        answer = gateway.post(path, json=body)
        assert answer.status_code == 503, answer.text
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json["title"] == "No room for new work" and "maxmemory" in answer.json["detail"]
    with pytest.raises(StoreFull):
        submit(RolloutStore(client, settings(server)), "two")
    through(store, "one", None)


def test_what_was_taken_since_the_last_look_at_redis_counts(client, store, monkeypatch):
    monkeypatch.setattr("services.state.memory.LOOK_EVERY_S", 60.0)
    client.setrange("filler", 20 << 20, "x")
    limit = 2 * client.info("memory")["used_memory"]
    client.config_set("maxmemory", limit)
    room, most = Room(client), (REFUSE_AT - 0.5) * limit
    size = int(0.6 * most / COPIES)
    room.require(size)
    with pytest.raises(StoreFull):
        room.require(size)
    room.require(size // 2)


def test_results_may_take_half_of_redis_memory_where_no_limit_is_set(client, store, server):
    ids = [f"r{number}" for number in range(8)]
    submit(store, *ids)
    for id_ in ids:
        through(store, id_)
    results = ResultStore(client, settings(server))
    assert results.sweep() == []
    stored = results.stored_bytes()
    client.config_set("maxmemory", stored)  # half of it is less than what there is
    assert [drop.rollout_id for drop in results.sweep()] == ids[:4], "the oldest"
    client.config_set("maxmemory", 0)
    assert ResultStore(client, settings(server, results_max_bytes=0)).sweep() == []
