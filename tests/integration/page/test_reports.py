"""What trainers report of their steps: kept by tenant and run, in bounds, read in order."""

from __future__ import annotations

import json
import math
import threading

import pytest
from werkzeug.serving import make_server

from rollout.client import Client
from services.state import keys
from services.state import reports as store
from services.state.api_keys import Scope
from services.state.reports import ReportStore


def put(world, step, who="a", **more):
    return world.post("/v1/reports", who, {"step": step, "metrics": {"reward": step / 10}, **more})


def steps(world, run="default", who="a", **query):
    answer = world.get(f"/v1/reports/{run}", who, query_string=query)
    return [item["step"] for item in answer.json["reports"]]


def test_reports_come_back_in_the_order_of_steps_and_a_step_is_said_once(world):
    world.key("a")
    for step in (3, 1, 2):
        assert put(world, step, policy_version=f"v{step}").json["step"] == step
    put(world, 2, metrics={"reward": -0.5, "gap": 1e-7})
    answer = world.get("/v1/reports/default", "a").json
    assert [item["step"] for item in answer["reports"]] == [1, 2, 3]
    assert answer["reports"][1]["metrics"] == {"reward": -0.5, "gap": 1e-7}
    assert answer["reports"][1]["policy_version"] is None
    assert answer["reports"][2]["policy_version"] == "v3" and answer["reports"][2]["at"] > 1e9
    assert steps(world, limit=2) == [2, 3], "the latest"
    for step in (2**53, 2**53 - 1, 2**53):
        put(world, step, run="far")
    assert steps(world, "far") == [2**53 - 1, 2**53]


def test_runs_are_listed_the_latest_first_and_each_tenant_sees_its_own(world):
    for tenant in "ab":
        world.key(tenant)
    world.key("reader", Scope.READ)
    world.key("chief", Scope.ADMIN)
    put(world, 1, run="old")
    put(world, 7, run="new")
    put(world, 8, run="new")
    runs = world.get("/v1/reports", "a").json["runs"]
    assert [(run["run"], run["reports"], run["last"]["step"]) for run in runs] == [
        ("new", 2, 8),
        ("old", 1, 1),
    ]
    assert world.get("/v1/reports", "b").json["runs"] == []
    assert world.get("/v1/reports/new", "b").status_code == 404
    assert world.get("/v1/reports?tenant=a", "b").status_code == 403
    assert len(world.get("/v1/reports?tenant=a", "chief").json["runs"]) == 2
    assert steps(world, "new", "chief", tenant="a") == [7, 8]
    assert world.get("/v1/reports?tenant=*", "chief").status_code == 400
    assert put(world, 1, "reader").status_code == 403


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"step": -1}, "step"),
        ({"step": 2**60}, "step"),
        ({"step": 1.5}, "step"),
        ({"metrics": {}}, "metrics"),
        ({"metrics": {f"m{i}": 1 for i in range(65)}}, "metrics"),
        ({"metrics": {"x" * 65: 1}}, "metrics"),
        ({"metrics": {"": 1}}, "metrics"),
        ({"metrics": {"a\nb": 1}}, "metrics"),
        ({"metrics": {"a": "much"}}, "metrics"),
        ({"metrics": {"a": None}}, "metrics"),
        ({"run": "../x"}, "run"),
        ({"run": "x" * 65}, "run"),
        ({"policy_version": "v" * 129}, "policy_version"),
        ({"loss": 1}, "loss"),
    ],
)
def test_what_is_no_report_is_refused_and_the_field_named(world, body, field):
    world.key("a")
    answer = world.post("/v1/reports", "a", {"step": 1, "metrics": {"a": 1}, **body})
    assert answer.status_code == 400 and answer.json["errors"][0]["field"].startswith(field), answer.text
    assert world.get("/v1/reports", "a").json["runs"] == []


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_what_is_no_finite_number_is_refused(world, number):
    world.key("a")
    body = f'{{"step": 1, "metrics": {{"loss": {number}}}}}'
    answer = world.call("POST", "/v1/reports", "a", data=body, content_type="application/json")
    assert answer.status_code == 400


def bounded(world, monkeypatch, **bounds):
    for name, value in bounds.items():
        monkeypatch.setattr(store, name, value)
    world.gate.reports = ReportStore(world.redis)


def test_beyond_the_limits_first_steps_and_stale_runs_make_room(world, monkeypatch):
    world.key("a")
    bounded(world, monkeypatch, MOST_RUNS=2, MOST_REPORTS=3)
    for step in range(5):
        put(world, step, run="one")
    assert steps(world, "one") == [2, 3, 4]
    put(world, 1, run="two")
    put(world, 5, run="one")
    put(world, 1, run="three")
    assert {run["run"] for run in world.get("/v1/reports", "a").json["runs"]} == {"one", "three"}
    assert not world.redis.exists(keys.reports("a", "two"))


def test_the_bytes_of_a_tenant_s_reports_are_bounded_and_counted_right(world, monkeypatch):
    world.key("a")
    bounded(world, monkeypatch, MOST_BYTES=1000)
    for step in range(40):
        assert put(world, step % 30, run=f"run-{step % 3}").status_code == 200
    kept = {key: world.redis.zrange(key, 0, -1) for key in world.redis.keys("reports:run:a:*")}
    sizes = world.redis.hgetall(keys.reports_bytes("a"))
    assert {f"reports:run:a:{run}": int(size) for run, size in sizes.items()} == {
        key: sum(map(len, texts)) for key, texts in kept.items()
    }
    assert 0 < sum(map(int, sizes.values())) <= 1000
    assert 39 % 30 in steps(world, "run-0"), "what was said last is there"


def test_the_bytes_of_a_run_are_bounded_for_it_is_read_at_once(world, monkeypatch):
    world.key("a")
    bounded(world, monkeypatch, MOST_RUN_BYTES=400)
    for step in range(20):
        put(world, step)
    (size,) = world.redis.hvals(keys.reports_bytes("a"))
    assert int(size) <= 400 and steps(world)[-1] == 19


def test_reports_are_forgotten_when_nothing_was_said_for_long(world, monkeypatch):
    world.key("a")
    put(world, 1)
    assert all(0 < world.redis.ttl(key) <= store.KEEP_S for key in world.redis.keys("reports:*"))
    world.redis.zadd(keys.reports_of("a"), {"default": 1.0})
    put(world, 1, run="other")
    assert [run["run"] for run in world.get("/v1/reports", "a").json["runs"]] == ["other"]
    assert not world.redis.exists(keys.reports("a", "default"))


def test_a_redis_that_gets_full_takes_no_reports(world):
    world.key("a")
    put(world, 1)
    world.redis.config_set("maxmemory", "1mb")
    try:
        world.gate.reports = ReportStore(world.redis)  # which has not looked yet
        answer = put(world, 2)
    finally:
        world.redis.config_set("maxmemory", "0")
    assert answer.status_code == 503 and answer.headers["Retry-After"]
    assert steps(world) == [1]


def test_the_client_reports_and_leaves_out_what_is_no_number(world):
    text = world.key("a")
    server = make_server("127.0.0.1", 0, world.app, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with Client(f"http://127.0.0.1:{server.server_port}", api_key=text) as client:
            client.report(
                4, {"reward": 1, "loss": math.nan, "gap": None, "big": math.inf}, policy_version="v4"
            )
            client.report(5, {"loss": math.nan})
            (report,) = client.reports()
    finally:
        server.shutdown()
        server.server_close()
    assert (report.step, report.metrics, report.policy_version) == (4, {"reward": 1.0}, "v4")
    assert json.loads(world.redis.zrange(keys.reports("a", "default"), 0, 0)[0])["metrics"] == {"reward": 1.0}
