"""Who may work on an update, who hears of it, and what is remembered."""

from __future__ import annotations

import io
import json
import threading
import time
from unittest import mock
from urllib.parse import urlsplit

import pytest
import urllib3
from redis.exceptions import LockError
from requests.adapters import HTTPAdapter

from rollout.policy import PolicyRequest, UpdateState
from rollout.schema import Backend
from services.state.backends.store import BackendStore
from services.state.policy.store import HISTORY, Current, LeaseLost, PolicyStore, UpdateConflict
from tests.helpers.chores import Clock
from tests.helpers.stack import wait_until
from workers.exchange import BROKEN_OFF
from workers.weights import WeightUpdates, _each, _Leases

BACKEND = Backend(id="b", url="http://127.0.0.1:9", model="m", tokenizer="t", max_model_len=64)
PATIENCE_S = 120


@pytest.fixture
def redis(server):
    return server.client


@pytest.fixture
def store(redis):
    redis.flushall()
    return PolicyStore(redis)


def end(store, state=UpdateState.DONE, current=None):
    """Claim the update under way and end it."""
    work = store.claim("worker", 30)
    work.record.update.state = state
    store.finish(work, current)
    return work.record.update


def test_one_worker_at_a_time_has_an_update_and_its_successor_s_work_is_not_overwritten(store, redis):
    store.create(PolicyRequest(version="v1", path="/a"), [BACKEND])
    first = store.claim("one", 30)
    assert store.claim("two", 30) is None
    assert 0 < redis.pttl("policy:lease") <= 30_000
    redis.pexpire("policy:lease", 1)
    second = wait_until(lambda: store.claim("two", 30), PATIENCE_S, "the lease to run out")
    second.record.update.started_at = 1.0
    store.save(second)
    first.record.update.state = UpdateState.FAILED
    with pytest.raises(LeaseLost, match="another worker goes on"):
        store.save(first)
    with pytest.raises(LeaseLost):
        store.finish(first, None)
    with pytest.raises(LockError):
        first.lease.reacquire()
    assert second.lease.reacquire()
    assert store.get(second.record.update.id).started_at == 1.0
    assert store.under_way()


def test_the_same_request_is_one_update_and_another_is_refused_until_it_has_ended(store):
    request = PolicyRequest(version="v1", path="/a")
    made, new = store.create(request, [BACKEND])
    assert new
    assert store.create(request, [BACKEND]) == (made, False)
    with pytest.raises(UpdateConflict, match=made.id):
        store.create(PolicyRequest(version="v2", path="/b"), [BACKEND])
    done = end(store, current=current_of("v1"))
    assert store.create(request, [BACKEND]) == (done, False)
    # One that failed is tried again.
    store.create(PolicyRequest(version="v2", path="/b"), [BACKEND])
    failed = end(store, UpdateState.FAILED)
    again, new = store.create(PolicyRequest(version="v2", path="/b"), [BACKEND])
    assert new
    assert again.id != failed.id
    end(store)
    # And so is one that is done but has been replaced since.
    assert store.create(request, [BACKEND])[1]


def test_a_ring_wakes_a_sleeping_worker_and_the_end_wakes_who_waits_for_it(store):
    awake, answers = threading.Event(), []

    def worker():
        store.await_bell(PATIENCE_S)
        awake.set()

    threading.Thread(target=worker, daemon=True).start()
    made, _ = store.create(PolicyRequest(version="v1"), [BACKEND])
    assert awake.wait(PATIENCE_S / 2)
    waiter = threading.Thread(target=lambda: answers.append(store.wait(made.id, PATIENCE_S)), daemon=True)
    waiter.start()
    end(store)
    waiter.join(PATIENCE_S / 2)
    assert [update.state for update in answers] == ["done"]
    started = time.monotonic()
    assert store.wait("unknown", PATIENCE_S) is None
    assert time.monotonic() - started < PATIENCE_S / 2


def test_the_latest_updates_are_remembered_and_no_more(store, redis):
    for number in range(HISTORY + 5):
        store.create(PolicyRequest(version=f"v{number}"), [BACKEND])
        end(store)
    history = store.status().history
    assert redis.llen("policy:order") == HISTORY
    assert redis.llen("policy:bell") == 1, "one ring wakes one worker"
    assert [update.version for update in history] == [f"v{n}" for n in range(HISTORY + 4, 4, -1)]
    assert redis.hlen("policy:updates") == HISTORY
    assert store.totals()["n_done"] == HISTORY + 5


def current_of(version, update_id="u"):
    policy = {"version": version, "path": "/a", "verified": False, "update_id": update_id, "since": 1.0}
    return Current(policy=policy, request=PolicyRequest(version=version, path="/a"))


def test_the_latest_versions_are_known_by_when_they_came_and_no_more(store, redis):
    redis.zadd("policy:sequence", {f"old{number}": number for number in range(1000)})
    redis.hset("policy:totals", "changes", 1000)
    store.create(PolicyRequest(version="new", path="/a"), [BACKEND])
    end(store, current=current_of("new"))
    assert redis.zcard("policy:sequence") == 1000
    assert redis.zscore("policy:sequence", "new") == 1001 and redis.zscore("policy:sequence", "old0") is None
    assert (store.age("new"), store.age("old999")) == (0, 2)
    assert redis.exists("policy:active", "policy:lease") == 0


def test_weights_are_forgotten_once_nobody_serves_or_brings_them(store, fleet):
    store.create(PolicyRequest(version="v0"), [BACKEND])
    with pytest.raises(UpdateConflict):
        store.forget()
    end(store, current=current_of("v0"))
    assert store.forget() == ["a", "b", "c"] and fleet.wanted_version() == "v0"
    fleet.set_version("a", "v1")
    fleet.remove("b")
    fleet.remove("c")
    assert fleet.wanted_version() == "v0", "an engine that comes back must not sample from its own"
    assert store.forget() == []
    assert (store.current(), fleet.wanted_version()) == (None, None)
    assert store.forget() == []
    assert store.create(PolicyRequest(version="v0"), [BACKEND])[1], "what was forgotten is brought again"
    fleet._redis.delete("policy:updates")
    assert store.forget() == [] and not store.under_way(), "an update whose record is gone"


class NoBackends:
    """A fleet from which every backend was removed."""

    def __init__(self):
        self.versions = []

    def get(self, _):
        return None

    def want_version(self, version, policy="default"):
        self.versions.append(version)


def test_an_update_of_backends_that_are_gone_ends_and_the_policy_stays(store):
    made, _ = store.create(PolicyRequest(version="v1", path="/a"), [BACKEND])
    fleet = NoBackends()
    WeightUpdates(store, fleet, "worker").carry_out(store.claim("worker", 30))
    record = store.get(made.id)
    assert (record.state, record.backends["b"].state) == ("failed", "skipped")
    assert (store.current(), fleet.versions) == (None, [None])


def test_a_backend_is_left_alone_while_an_update_is_under_way_or_another_has_it(store, redis):
    request = PolicyRequest(version="v1", path="/a")
    made, _ = store.create(request, [BACKEND])
    work = store.claim("worker", 30)
    updates = WeightUpdates(store, NoBackends(), "late")
    assert updates.bring_current(BACKEND) is None
    store.finish(work, current_of("v1", made.id))
    lock = store.lock("b", 30)
    assert lock.acquire(blocking=False)
    assert updates.bring_current(BACKEND) is None
    lock.release()
    assert redis.get("policy:lock:b") is None


# -- an update of several backends -----------------------------------------------------------


class Engines:
    """LLM servers that take weights, or refuse them, and note what placement wanted meanwhile."""

    def __init__(self, fleet, refuse=(), at_once=1):
        """The first `at_once` of them to be asked answer once all of them have been."""
        self.fleet, self.refuse = fleet, refuse
        self.asked, self.versions = [], []
        self.busy = self.most_busy = 0
        self._lock, self._first = threading.Lock(), threading.Barrier(at_once)

    def answer(self, name, path):
        """The status and the body."""
        loads = path == "/update_weights_from_disk"
        if loads:
            self._load(name)
        fails = loads and name in self.refuse
        return 400 if fails else 200, {"success": not fails, "message": "no such file"}

    def __enter__(self):
        """They answer instead of the network."""

        def send(adapter, call, **_):
            url = urlsplit(call.url)
            status, body = self.answer(url.hostname, url.path)
            raw = io.BytesIO(json.dumps(body).encode())
            return adapter.build_response(
                call, urllib3.HTTPResponse(raw, status=status, preload_content=False)
            )

        self._patched = mock.patch.object(HTTPAdapter, "send", send)
        self._patched.start()
        return self

    def __exit__(self, *_):
        self._patched.stop()

    def _load(self, name):
        with self._lock:
            self.busy += 1
            self.most_busy = max(self.most_busy, self.busy)
            self.asked.append(name)
            self.versions.append(self.fleet.wanted_version())
            is_first = len(self.asked) <= self._first.parties
        if is_first:
            self._first.wait(30)
        with self._lock:
            self.busy -= 1


@pytest.fixture
def fleet(redis, store):
    """Three backends that serve `v0`, which the fleet wants."""
    fleet = BackendStore(redis)
    for name in "abc":
        fleet.put(sglang(name))
    fleet.want_version("v0")
    return fleet


def sglang(name):
    kind = {"engine": "sglang", "api": "sglang", "policy_version": "v0", "max_model_len": 64}
    return Backend(id=name, url=f"http://{name}", model="m", tokenizer="t", **kind)


def updated(store, fleet, engines, **request):
    """An update to `v1`, carried out."""
    asked = PolicyRequest(**{"version": "v1", "path": "/ckpt", **request})
    made, _ = store.create(asked, [fleet.get(name) for name in asked.backends or "abc"])
    with engines:
        WeightUpdates(store, fleet, "worker").carry_out(store.claim("worker", 30))
    return store.get(made.id)


@pytest.mark.parametrize(
    ("concurrency", "meanwhile"),
    [(1, [None, None, None]), (2, [None, None, None]), (0, ["v0", "v0", "v0"]), (3, ["v0", "v0", "v0"])],
)
def test_an_update_has_the_fleet_want_its_version_and_one_by_one_only_at_its_end(
    store, fleet, concurrency, meanwhile
):
    engines = Engines(fleet, at_once=concurrency or 3)
    assert updated(store, fleet, engines, concurrency=concurrency).state == "done"
    assert (sorted(engines.asked), engines.versions) == (["a", "b", "c"], meanwhile)
    assert engines.most_busy == (concurrency or 3)
    assert fleet.wanted_version() == "v1" == store.current().policy.version
    assert {backend.policy_version for backend in fleet.list()} == {"v1"}


@pytest.mark.parametrize(("before", "version"), [(None, None), ("v0", "v0")])
@pytest.mark.parametrize("concurrency", [0, 1])
def test_an_update_that_no_backend_takes_leaves_the_fleet_as_it_was(
    store, fleet, before, version, concurrency
):
    if before:
        store.create(PolicyRequest(version=before, path="/a"), [BACKEND])
        end(store, current=current_of(before))
    update = updated(store, fleet, Engines(fleet, refuse="abc"), concurrency=concurrency)
    assert update.state == "failed" and "no such file" in update.backends["a"].error
    assert fleet.wanted_version() == version
    assert (store.current() and store.current().policy.version) == before


SENT = {
    "ranks": {"a": 1, "b": 2},
    "init_info": {"master_address": "10.0.0.1", "master_port": 29500, "world_size": 3},
    "update_info": {"names": ["model.weight"], "dtypes": ["bfloat16"], "shapes": [[2, 2]]},
}


def test_weights_that_the_trainer_sent_are_current_and_nobody_can_bring_them_again(store, fleet, redis):
    paths = []
    engines = Engines(fleet)
    answer, records = engines.answer, set()

    def noted(name, path):
        paths.append((name, path))
        records.add(redis.hget("policy:updates", redis.get("policy:active")))
        return answer(name, path)

    engines.answer = noted
    update = updated(store, fleet, engines, path=None, transfer=SENT)
    assert (update.state, update.transfer, update.path) == ("done", "nccl", None)
    assert sorted(name for name, path in paths if path == "/update_weights_from_distributed") == ["a", "b"]
    assert records and not any("model.weight" in record for record in records), "it is written at each step"
    assert fleet.wanted_version() == "v1" == store.current().policy.version
    # c was not in the group: new rollouts stay away until the trainer sends to it, too.
    paths.clear()
    with engines:
        assert WeightUpdates(store, fleet, "worker").bring_current(fleet.get("c")) is None
    assert paths == []
    assert [fleet.get(name).policy_version for name in "abc"] == ["v1", "v1", "v0"]


def test_engines_that_only_join_a_group_change_nothing_of_the_current_policy(store, fleet):
    store.create(PolicyRequest(version="v0", path="/a"), [BACKEND])
    end(store, current=current_of("v0"))
    before, age = store.current(), store.age("v0")
    connect = {"transfer": {**SENT, "update_info": None}, "path": None}
    assert updated(store, fleet, Engines(fleet), version="v0", **connect).state == "done"
    assert (store.current(), store.age("v0")) == (before, age), "who comes late can still load them"
    assert [fleet.get(name).policy_version for name in "abc"] == ["v0"] * 3
    # A trainer that is elsewhere: they are connected, and labelled as what they have.
    update = updated(store, fleet, Engines(fleet), version="v7", **connect)
    assert [backend.state for backend in update.backends.values()] == ["skipped"] * 2
    assert all(backend.healthy and not backend.paused for backend in fleet.list())
    assert [fleet.get(name).policy_version for name in "abc"] == ["v0"] * 3
    assert (store.current(), fleet.wanted_version()) == (before, "v0")


def test_a_sending_that_a_killed_worker_had_begun_fails_with_all_its_backends(store, fleet, redis):
    asked = PolicyRequest(version="v1", transfer=SENT)
    made, _ = store.create(asked, [fleet.get("a"), fleet.get("b")])
    first = store.claim("one", 30)
    with mock.patch("workers.weights._each", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        WeightUpdates(store, fleet, "one").carry_out(first)  # b has not even been paused
    assert store.create(asked, [])[0].id == made.id, "the same sending, asked for again"
    redis.delete("policy:lease")
    engines, paths = Engines(fleet), []
    answer = engines.answer
    engines.answer = lambda name, path: paths.append(path) or answer(name, path)
    with engines:
        WeightUpdates(store, fleet, "two").carry_out(store.claim("two", 30))
    update = store.get(made.id)
    assert update.state == "failed"
    assert all(BROKEN_OFF in backend.error for backend in update.backends.values())
    assert paths == ["/pause_generation"] * 2, "their calls are ended, and they receive nothing"
    assert [fleet.get(name).healthy for name in "abc"] == [False, False, True]
    assert fleet.wanted_version() is None


def test_a_worker_whose_lease_is_lost_writes_nothing_more_and_goes_to_no_further_backend(store, fleet, redis):
    engines = Engines(fleet)
    answer = engines.answer

    def taken_over(*call):
        redis.set("policy:lease", "another", px=30_000)
        return answer(*call)

    engines.answer = taken_over
    with pytest.raises(LeaseLost):
        updated(store, fleet, engines, concurrency=1)
    assert len(engines.asked) <= 1 and store.under_way()
    assert fleet.wanted_version() is None, "its successor begins with a fleet that takes rollouts"


def test_an_update_whose_record_is_gone_stands_in_nobody_s_way(store, redis):
    store.create(PolicyRequest(version="v1", path="/a"), [BACKEND])
    redis.delete("policy:updates")
    assert store.claim("worker", 30) is None
    assert not store.under_way() and not redis.exists("policy:lease")
    store.create(PolicyRequest(version="v2", path="/b"), [BACKEND])
    assert end(store).version == "v2"


def test_leases_are_kept_while_they_are_held_and_their_loss_is_told(store, redis):
    # Every second; it is held ten times as long, for a thread that gets no processor.
    leases, lease = _Leases(3.0), store.lock("b", 30.0)
    key, _ = lease.name, lease.acquire()
    token = redis.get(key)
    with leases.hold(lease) as lost:
        redis.pexpire(key, 20_000)
        wait_until(lambda: redis.pttl(key) > 20_000, 120, "it to be extended")
        assert redis.get(key) == token and not lost.is_set()
        redis.set(key, "another")
        assert lost.wait(25)
    assert redis.get(key) == "another"


def test_the_first_error_of_many_stops_the_rest_and_all_names_are_done_otherwise():
    done = []
    _each(done.append, list("abcdef"), 2)
    assert sorted(done) == list("abcdef")
    tried = []

    def fails(name):
        tried.append(name)
        raise ValueError(name)

    with pytest.raises(ValueError, match="a"):
        _each(fails, list("abcdef"), 1)
    assert tried == ["a"]


def test_a_backend_that_does_not_catch_up_is_tried_ever_more_rarely(store, fleet, monkeypatch):
    updates, tried, go_on = WeightUpdates(store, fleet, "worker"), [], threading.Event()
    clock = Clock()
    clock.sleep = time.sleep  # for leases of the tests before, which go on
    monkeypatch.setattr("workers.weights.time", clock)

    def bring_current(backend):
        tried.append(backend.id)
        go_on.wait(30)
        return len(tried) > 3

    monkeypatch.setattr(updates, "bring_current", bring_current)
    for pause in (5.0, 10.0, 20.0, 0.0):
        for _ in range(3):
            updates.catch_up(sglang("a"))  # two at a time would freeze its calls twice
        go_on.set()
        wait_until(
            lambda: updates._retries["a", "default"][0] < float("inf"), PATIENCE_S, "the attempt to end"
        )
        go_on.clear()
        assert updates._retries["a", "default"] == (clock.now + pause, pause)
        clock.now += pause / 2
        if pause:
            updates.catch_up(sglang("a"))  # too early
        clock.now += pause / 2
    assert tried == ["a"] * 4


def test_a_backend_is_free_again_once_it_has_the_current_weights(store, fleet, redis):
    store.create(PolicyRequest(version="v1", path="/a"), [BACKEND])
    end(store, current=current_of("v1"))
    updates = WeightUpdates(store, fleet, "worker")
    with Engines(fleet, refuse="b"):
        assert [updates.bring_current(sglang(name)) for name in "ab"] == [True, False]
    assert redis.keys("policy:lock:*") == []
