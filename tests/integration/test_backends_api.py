"""`/v1/backends` and what /metrics says of backends: the true gateway and Redis, the embedded engine."""

from __future__ import annotations

import re
import time

import pytest

from rollout.schema import Backend, BackendStats
from services.gateway.app import create_app
from services.gateway.context import EXTENSION
from services.settings import Settings
from tests.helpers.described import SGLANG, describing
from tests.helpers.heap import Heap
from tests.helpers.keys import keyed
from tests.helpers.llm_servers import free_port


@pytest.fixture(scope="module")
def app(server):
    """A gateway in this process on a Redis of its own, so that no worker gives these backends rollouts."""
    return create_app(Settings(redis_url=server.url))


@pytest.fixture
def store(app):
    """The heap behind the gateway, empty."""
    app.extensions[EXTENSION].redis.flushall()
    return Heap(app.extensions[EXTENSION].redis)


@pytest.fixture
def api(app, store):
    return keyed(app)


def added(api, url, **fields) -> Backend:
    answer = api.post("/v1/backends", json={"url": url, **fields})
    assert answer.status_code == 201, answer.text
    return Backend.model_validate(answer.json)


def problem(answer, status):
    assert (answer.status_code, answer.content_type) == (status, "application/problem+json"), answer.text
    return answer.json


def test_a_backend_is_added_with_what_its_server_says(api, embedded):
    backend = added(api, embedded.url, max_rollouts=7)
    assert (backend.engine, backend.api, backend.model) == ("embedded", "generate", "demo")
    assert (backend.max_model_len, backend.max_rollouts) == (2048, 7)
    assert backend.capacity_tokens > 0 and backend.logprobs_mode == "processed_logprobs"
    assert api.get(f"/v1/backends/{backend.id}").json == api.get("/v1/backends").json["backends"][0]


def test_the_same_url_again_updates_and_keeps_the_load(api, store, embedded):
    first = added(api, embedded.url, id="mine")
    assert store.acquire("r1", tokens=500).backend.id == "mine"
    again = added(api, f"{embedded.url}/v1/", capacity_tokens=9000, max_rollouts=3)
    assert (again.id, again.capacity_tokens, again.max_rollouts) == ("mine", 9000, 3)
    assert (again.live_rollouts, again.load) == (1, 500)
    assert [b.id for b in store.list()] == [first.id]
    refused = problem(api.post("/v1/backends", json={"url": embedded.url, "id": "other"}), 409)
    assert "registered as 'mine'" in refused["detail"]


def test_the_list_tells_load_health_cache_and_weights(api, store, embedded):
    backend = added(api, embedded.url, id="one")
    store.acquire("r1", tokens=400)
    stats = BackendStats(
        at=time.time(), running=2, waiting=1, kv_usage=0.5, prompt_tokens=80, cached_tokens=20
    )
    store.put_stats("one", stats)
    (shown,) = api.get("/v1/backends").json["backends"]
    assert (shown["load"], shown["live_rollouts"]) == (400, 1)
    assert (shown["healthy"], shown["error"], shown["draining"], shown["paused"]) == (
        True,
        None,
        False,
        False,
    )
    assert shown["stats"]["cached_ratio"] == 0.25
    assert (shown["stats"]["running"], shown["stats"]["waiting"]) == (2, 1)
    assert shown["policy_version"] == backend.policy_version
    store.fail("one", "no answer within 5 s")
    shown = api.get("/v1/backends/one").json
    assert (shown["healthy"], shown["error"]) == (False, "no answer within 5 s")


def test_a_drained_backend_takes_no_new_rollouts_until_told_otherwise(api, store, embedded):
    added(api, embedded.url, id="one")
    drained = api.post("/v1/backends/one/drain")
    assert drained.status_code == 200 and drained.json["draining"] is True
    assert store.acquire("r1").backend is None
    assert api.post("/v1/backends/one/drain", json={"drain": False}).json["draining"] is False
    assert store.acquire("r1").backend.id == "one"
    wrong = problem(api.post("/v1/backends/one/drain", json={"drian": True}), 400)
    assert wrong["errors"][0]["field"] == "drian"


def test_a_backend_in_use_is_removed_by_force_only(api, store, embedded):
    added(api, embedded.url, id="one")
    store.acquire("r1")
    assert "1 live rollouts" in problem(api.delete("/v1/backends/one?force=false"), 409)["detail"]
    assert store.get("one") is not None
    assert api.delete("/v1/backends/one").status_code == 204
    assert api.get("/v1/backends").json == {"backends": []}
    added(api, embedded.url, id="one")
    assert api.delete("/v1/backends/one?force=false").status_code == 204


def test_a_backend_that_is_not_there_is_404(api):
    for answer in (
        api.get("/v1/backends/absent"),
        api.post("/v1/backends/absent/drain"),
        api.delete("/v1/backends/absent"),
        api.delete("/v1/backends/absent?force=false"),
    ):
        assert "there is no backend 'absent'" in problem(answer, 404)["detail"]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"url": "http://127.0.0.1:{port}"}, "url"),
        ({"url": "ftp://h"}, "url"),
        ({}, "url"),
        ({"url": "http://127.0.0.1:{port}", "modle": "m"}, "modle"),
        ({"url": "http://127.0.0.1:{port}", "max_rollouts": 0}, "max_rollouts"),
        ({"url": "http://127.0.0.1:{port}", "logprobs_mode": "raw"}, "logprobs_mode"),
        ({"url": "{embedded}", "model": "absent"}, "model"),
    ],
)
def test_a_server_or_a_field_that_cannot_be_used_is_400_and_named(api, store, embedded, body, field):
    body = {
        k: v.format(port=free_port(), embedded=embedded.url) if k == "url" else v for k, v in body.items()
    }
    assert problem(api.post("/v1/backends", json=body), 400)["errors"][0]["field"] == field
    assert store.list() == []


def test_a_misspelt_parameter_is_400(api, embedded):
    added(api, embedded.url, id="one")
    for answer in (
        api.get("/v1/backends?stat=1"),
        api.get("/v1/backends/one?x=1"),
        api.post("/v1/backends/one/drain?drain=false"),
        api.delete("/v1/backends/one?froce=false"),
        api.delete("/v1/backends/one?force=no"),
    ):
        problem(answer, 400)
    assert api.get("/v1/backends/one").status_code == 200


def test_bad_sampling_is_refused_at_submission(api):
    body = {"handler": "noop", "sampling": {"stop_token_ids": [-1], "temperature": 0.001}}
    fields = {e["field"] for e in problem(api.post("/v1/rollouts", json=body), 400)["errors"]}
    assert fields == {"sampling.stop_token_ids.0", "sampling.temperature"}


def test_sglang_can_be_added(api):
    with describing(SGLANG) as url:
        backend = added(api, url)
    assert (backend.engine, backend.api, backend.policy_version) == ("sglang", "sglang", "step-3")


def test_metrics_tell_of_each_backend_what_it_said_and_nothing_it_did_not(api, store, embedded):
    added(api, embedded.url, id="one", capacity_tokens=9000)
    with describing(SGLANG) as url:
        added(api, url, id="two")
    store.acquire("r1", tokens=300, exclude=("two",))
    stats = BackendStats(
        at=time.time(), running=2, waiting=0, kv_usage=0.5, prompt_tokens=80, cached_tokens=20
    )
    store.put_stats("one", stats.model_copy(update={"requests": 4, "request_seconds": 2.5}))
    store.drain("two")
    store.fail("two", "away")
    text = api.get("/metrics").text
    values = dict(re.findall(r'^rollout_backend_(\w+{backend="\w+"}) (\S+)$', text, re.MULTILINE))
    assert 0 <= float(values.pop('probe_age_seconds{backend="one"}')) < 60
    assert {name: float(value) for name, value in values.items()} == {
        'up{backend="one"}': 1,
        'up{backend="two"}': 0,
        'load{backend="one"}': 300,
        'load{backend="two"}': 0,
        'live_rollouts{backend="one"}': 1,
        'live_rollouts{backend="two"}': 0,
        'capacity_tokens{backend="one"}': 9000,
        'capacity_tokens{backend="two"}': 100_000,
        'requests_running{backend="one"}': 2,
        'requests_waiting{backend="one"}': 0,
        'kv_usage{backend="one"}': 0.5,
        'prompt_tokens_total{backend="one"}': 80,
        'cached_tokens_total{backend="one"}': 20,
        'requests_total{backend="one"}': 4,
        'request_seconds_total{backend="one"}': 2.5,
        'draining{backend="one"}': 0,
        'draining{backend="two"}': 1,
        'paused{backend="one"}': 0,
        'paused{backend="two"}': 0,
    }
    assert re.search(r'^rollout_placements_total{event="placed"} 1\.0$', text, re.MULTILINE)
