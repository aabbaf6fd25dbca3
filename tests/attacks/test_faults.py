"""Attacks on what all tenants share: attempts, the reaper, Redis' memory, the clocks.

Each is made on a real Redis with the service's own scripts; in a control the wall under test is down.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass

import pytest
import redis

from rollout.schema import RolloutRequest, Stage, State
from rollout.trajectory import Chain, Segment, Trajectory
from services.settings import Settings
from services.state import keys, memory, scripts
from services.state.fleet import FleetStore
from services.state.redis import connect
from services.state.rollouts.store import Finish, NewRollout, RolloutStore
from tests.attacks import attack
from tests.helpers.chores import services
from tests.helpers.dying_fleet import DyingFleet
from tests.helpers.stack import RedisServer
from tests.helpers.wrong_clock import WrongClock
from workers import patience
from workers.chores.reaper import Reaper

HOUR_S = 3600.0
RESULT = Trajectory(chains=[Chain(segments=[Segment(role="assistant", token_ids=list(range(100_000)))])])


@dataclass
class Service:
    """A Redis and what the service's processes make of it."""

    place: str
    control: bool
    client: redis.Redis
    clock: WrongClock
    patch: pytest.MonkeyPatch

    def without(self, script: str, wall: str, hole: str) -> None:
        """In a control, change a script."""
        if not self.control:
            return
        before = scripts.text
        assert before(script).count(wall) == 1, f"{wall!r} is not in {script}.lua: the control shows nothing"
        self.patch.setattr(
            scripts,
            "text",
            lambda name: before(name).replace(wall, hole) if name == script else before(name),
        )

    def settings(self) -> Settings:
        return Settings(redis_url=self.url, lease_s=30.0)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.client.connection_pool.connection_kwargs['port']}/0"

    def store(self) -> RolloutStore:
        return RolloutStore(self.client, self.settings())

    def reaper(self) -> Reaper:
        return Reaper(services(self.client, self.settings(), "r"))

    def submit(self, store: RolloutStore, name: str, **task) -> None:
        request = RolloutRequest(handler="noop", task=task)
        store.submit([NewRollout(name, name, 0, request, request.model_dump_json(), name)])

    def fill(self) -> None:
        """Let twice as much be used as there may be, whatever Redis frees by itself."""
        self.client.config_set("maxmemory", self.client.info("memory")["used_memory"] // 2)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    clock = WrongClock(tmp_path_factory.mktemp("clock"))
    server = RedisServer(tmp_path_factory.mktemp("redis"), env={**os.environ, **clock.env})
    yield server, clock
    server.stop()


@pytest.fixture(params=["service", "control"])
def target(request, server, monkeypatch):
    client, clock = connect(server[0].url), server[1]
    client.config_set("maxmemory", 0)
    client.flushall()
    yield Service("service", request.param == "control", client, clock, monkeypatch)
    client.config_set("maxmemory", 0)
    clock.set(0)


@attack(stopped_by="behind the second lost worker the suspect is alone")
def test_cost_its_neighbours_their_attempts_by_ending_their_worker(target):
    target.without("rollouts/record", "if other.state and other.id ~= r.id", "if false")
    workers, neighbours = DyingFleet(target.client, target.store()), [f"n{number}" for number in range(8)]
    workers.submit("poison", *neighbours)
    workers.live_out("poison", neighbours)
    return any(workers.store.get(rollout_id).state is not State.COMPLETED for rollout_id in neighbours)


@attack(stopped_by="the reaper's election and scripts go on in a full Redis")
def test_stop_the_reaper_for_everybody_by_filling_redis(target):
    target.without("full", "redis.call('DEL', 'memory:though-full')", "")
    store, reaper = target.store(), target.reaper()
    target.submit(store, "over")
    target.client.hset(keys.record("over"), "deadline", 1)
    target.client.zadd(keys.DUE, {"over": 0})
    target.fill()
    try:
        if reaper.election.won():
            reaper.tick()
    except redis.RedisError:
        pass
    return store.get("over").state is not State.TIMED_OUT


@attack(stopped_by="heartbeats go on in a full Redis")
def test_have_others_lose_their_leases_by_filling_redis(target):
    target.without("full", "redis.call('DEL', 'memory:though-full')", "")
    store = target.store()
    target.submit(store, "victim")
    claim = store.claim("victim", 1, Stage.INIT, "worker")
    target.fill()
    try:
        return store.heartbeat([("victim", claim.fence)]) != ["ok"]
    except redis.RedisError:
        return True


@attack(stopped_by="a finished stage waits for room")
def test_have_others_lose_finished_work_by_filling_redis(target):
    if target.control:
        away = (redis.ConnectionError, redis.TimeoutError)
        target.patch.setattr(patience, "is_away", lambda error: isinstance(error, away))
    target.patch.setattr(patience, "RETRY_S", 0.02)
    store = target.store()
    target.submit(store, "victim")
    store.finish(store.claim("victim", 1, Stage.INIT, "worker"), Finish(State.READY))
    claim = store.claim("victim", 1, Stage.RUN, "worker")
    target.fill()
    tries = []

    def finish() -> str:
        tries.append(1)
        if len(tries) == 3:  # somebody has made room
            target.client.config_set("maxmemory", 0)
        return store.finish(claim, Finish(State.EVALUATING, {}, RESULT))

    try:
        return patience.wait_for(finish) != State.EVALUATING
    except redis.RedisError:
        return True


@attack(stopped_by="503 from 80 % on, counted as it comes")
def test_fill_redis_with_submissions_until_nobody_can_write(target):
    if target.control:
        target.patch.setattr(memory.Room, "require", lambda self, size: None)
    target.client.config_set("maxmemory", target.client.info("memory")["used_memory"] + (24 << 20))
    store = target.store()
    for size in (1 << 20, 1 << 16, 1 << 12):  # what is left where a large one does not fit
        for number in range(64):
            try:
                target.submit(store, f"r{size}-{number}", text="x" * size)
            except redis.OutOfMemoryError:
                break
    try:
        target.client.set("the result of somebody else", "x" * (1 << 20))
    except redis.OutOfMemoryError:
        return True
    return False


@attack(stopped_by="ages are told by Redis' clock")
def test_have_a_healthy_node_taken_for_dead_by_a_clock_that_is_behind(target):
    if target.control:
        target.patch.setattr(
            FleetStore,
            "_say",
            lambda self, place, name, what: self._redis.hset(
                place, name, json.dumps({"at": time.time(), **what})
            ),
        )
    behind = time.time() - 90.0
    target.patch.setattr(time, "time", lambda: behind)
    workers = FleetStore(target.client)
    workers.put_node("node", {"claimed": 1})
    workers.announce("run@node", ["run"], "node", slots=8)
    return workers.lost_nodes(30.0) == ["node"] or workers.alive()["run"] == []


@attack(stopped_by="the reaper compares Redis' clock with its own")
def test_end_everybodys_leases_by_a_jump_of_the_clock(target):
    reaper, store = target.reaper(), target.store()
    if target.control:
        target.patch.setattr(reaper._steadiness, "look", lambda: 0.0)
    target.submit(store, "victim")
    store.claim("victim", 1, Stage.INIT, "worker")
    reaper._steadiness.look()
    target.clock.set(HOUR_S)
    if jump := reaper._steadiness.look():
        reaper.clock_jumped(jump, 1.0)
    reaper.tick()
    return store.get("victim").attempt != 1 or store.get("victim").state.terminal
