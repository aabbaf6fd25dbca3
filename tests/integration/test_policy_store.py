"""Who may work on an update, who hears of it, and what is remembered."""

from __future__ import annotations

import threading
import time

import pytest

from rollout.policy import PolicyRequest, UpdateState
from rollout.schema import Backend
from services.state.policy import HISTORY, Current, LeaseLost, PolicyStore, UpdateConflict
from tests.helpers.stack import RedisServer, wait_until
from workers.weights import WeightUpdates

BACKEND = Backend(id="b", url="http://127.0.0.1:9", model="m", tokenizer="t", max_model_len=64)
PATIENCE_S = 60


@pytest.fixture(scope="module")
def redis(tmp_path_factory):
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server.client
    server.stop()


@pytest.fixture
def store(redis):
    redis.flushall()
    return PolicyStore(redis)


def end(store, state=UpdateState.DONE):
    """Claim the update under way and end it."""
    work = store.claim("worker", 30)
    work.record.update.state = state
    store.finish(work, None)
    return work.record.update


def test_one_worker_at_a_time_has_an_update_and_its_successor_s_work_is_not_overwritten(store, redis):
    store.create(PolicyRequest(version="v1", path="/a"), [BACKEND])
    first = store.claim("one", 30)
    assert store.claim("two", 30) is None
    redis.pexpire("policy:lease", 1)
    second = wait_until(lambda: store.claim("two", 30), PATIENCE_S, "the lease to run out")
    second.record.update.started_at = 1.0
    store.save(second)
    first.record.update.state = UpdateState.FAILED
    with pytest.raises(LeaseLost, match="another worker goes on"):
        store.save(first)
    with pytest.raises(LeaseLost):
        store.finish(first, None)
    assert not store.extend("policy:lease", first.token, 30)
    assert store.extend("policy:lease", second.token, 30)
    assert store.get(second.record.update.id).started_at == 1.0
    assert store.under_way()


def test_the_same_request_is_one_update_and_another_is_refused_until_it_has_ended(store):
    request = PolicyRequest(version="v1", path="/a")
    made, new = store.create(request, [BACKEND])
    assert new
    assert store.create(request, [BACKEND]) == (made, False)
    with pytest.raises(UpdateConflict, match=made.id):
        store.create(PolicyRequest(version="v2", path="/b"), [BACKEND])
    done = end(store)
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
    assert [update.version for update in history] == [f"v{n}" for n in range(HISTORY + 4, 4, -1)]
    assert redis.hlen("policy:updates") == HISTORY
    assert store.totals()["n_done"] == HISTORY + 5


class NoBackends:
    """A fleet from which every backend was removed."""

    def __init__(self):
        self.wanted = []

    def get(self, _):
        return None

    def want_version(self, version):
        self.wanted.append(version)


def test_an_update_of_backends_that_are_gone_ends_and_the_policy_stays(store):
    made, _ = store.create(PolicyRequest(version="v1", path="/a"), [BACKEND])
    fleet = NoBackends()
    WeightUpdates(store, fleet, "worker").carry_out(store.claim("worker", 30))
    found = store.get(made.id)
    assert (found.state, found.backends["b"].state) == ("failed", "skipped")
    assert (store.current(), fleet.wanted) == (None, [None])


def test_a_backend_is_left_alone_while_an_update_is_under_way_or_another_has_it(store, redis):
    request = PolicyRequest(version="v1", path="/a")
    made, _ = store.create(request, [BACKEND])
    work = store.claim("worker", 30)
    updates = WeightUpdates(store, NoBackends(), "late")
    assert updates.bring_current(BACKEND) is None
    policy = {"version": "v1", "path": "/a", "verified": False, "update_id": made.id, "since": 1.0}
    store.finish(work, Current(policy=policy, request=request))
    lock = store.lock("b", "other", 30)
    assert updates.bring_current(BACKEND) is None
    store.release(*lock)
    assert redis.get("policy:lock:b") is None
