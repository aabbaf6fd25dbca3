"""The HTTP API as a trainer and an operator use it."""

from __future__ import annotations

import re

import pytest

from rollout.schema import ResultPage, RolloutPage, RolloutRequest
from services.gateway.app import create_app
from services.settings import Settings
from tests.helpers.idle import in_time
from tests.helpers.keys import http, metric
from tests.helpers.stack import NODE, wait_until

SOON_S = 1.0
"""For an answer to be there, at an idle service."""


def get(stack, path, **params):
    return http.get(stack.url + path, params=params, timeout=240)


def test_a_long_poll_answers_when_the_rollout_ends_and_not_later(stack, client):
    (new,) = client.submit(RolloutRequest(handler="noop", task={"run_s": 0.7}))
    with in_time(0.7 + SOON_S, 25):  # whom nobody wakes is answered after the 30 s
        assert get(stack, f"/v1/rollouts/{new.id}", wait=30).json()["state"] == "completed"


def test_completions_come_in_the_order_of_completion_and_a_cursor_repeats(stack, client):
    cursor = get(stack, "/v1/results", cursor="$").json()["cursor"]
    (slow,) = client.submit(RolloutRequest(handler="noop", task={"run_s": 600}, tags=["order"]))
    (fast,) = client.run([RolloutRequest(handler="noop", tags=["order"])])
    (middle,) = client.run([RolloutRequest(handler="noop")])
    client.cancel(slow.id)
    client.wait(slow.id, timeout=240)
    every = ResultPage.model_validate(get(stack, "/v1/results", cursor=cursor).json())
    assert [item.id for item in every.rollouts] == [fast.id, middle.id, slow.id]
    tagged = get(stack, "/v1/results", cursor=cursor, tag="order").json()
    assert [item["id"] for item in tagged["rollouts"]] == [fast.id, slow.id]
    first = get(stack, "/v1/results", cursor=cursor, limit=1).json()
    assert [item["id"] for item in first["rollouts"]] == [fast.id]
    rest = get(stack, "/v1/results", cursor=first["cursor"]).json()
    assert [item["id"] for item in rest["rollouts"]] == [middle.id, slow.id]
    again = get(stack, "/v1/results", cursor=cursor, limit=1).json()
    assert [item["id"] for item in again["rollouts"]] == [fast.id]
    assert get(stack, "/v1/completions", cursor=cursor, limit=1).json() == again, "another name of it"
    assert get(stack, "/v1/results", cursor=every.cursor).json()["rollouts"] == []


@pytest.mark.parametrize("cursor", ["x", "-1", "1-2-3", "(0", "٣", "9" * 20, "1-" + "9" * 20])
def test_a_bad_cursor_is_refused(stack, cursor):
    response = get(stack, "/v1/results", cursor=cursor)
    assert response.status_code == 400 and response.json()["errors"][0]["field"] == "cursor"


def test_listing_filters_and_pages(stack, client):
    client.run([RolloutRequest(handler="noop", n=7, group_id="g-list", tags=["list"])])
    client.run([RolloutRequest(handler="noop", n=2, tags=["list"])])

    def page(**params):
        return RolloutPage.model_validate(get(stack, "/v1/rollouts", **params).json())

    assert len(page(group_id="g-list").rollouts) == 7
    assert len(page(tag="list").rollouts) == 9
    assert page(tag="list", state="queued").rollouts == []
    assert len(page(tag="list", state="completed", handler="noop").rollouts) == 9
    assert page(tag="list", handler="calculator").rollouts == []
    ids, cursor = [], None
    while True:
        piece = page(tag="list", limit=2, **({"cursor": cursor} if cursor else {}))
        ids += [item.id for item in piece.rollouts]
        cursor = piece.cursor
        if cursor is None:
            break
    assert len(ids) == len(set(ids)) == 9
    assert all(item.trajectory is None for item in page(tag="list").rollouts)
    assert get(stack, "/v1/rollouts", state="done").status_code == 400


def test_handlers_tell_their_schema(client):
    handlers = {info.name: info for info in client.handlers()}
    assert handlers["calculator"].uses_sandbox and handlers["calculator"].tools == ["execute_bash"]
    assert set(handlers["calculator"].task_schema["properties"]) == {"question", "answer"}


def test_ready_and_health(stack):
    root = get(stack, "/").json()
    assert root["service"] == "rollout" and root["status"] == "ok" and root["version"]
    assert get(stack, root["docs"].split()[0]).status_code == 200
    assert {root[name].split()[0] for name in ("ready", "metrics", "details", "flower")} == {
        *("/ready", "/metrics", "/v1/status")
    }
    assert get(stack, "/health").json() == {"status": "ok"}
    assert get(stack, "/ready").json() == {"ready": True, "missing": []}


def test_metrics_count_what_happened(stack, client):
    def value(line):
        return metric(stack.url, line)

    before = value('rollout_rollouts{state="completed"}')
    client.run([RolloutRequest(handler="noop", n=3)])
    assert value('rollout_rollouts{state="completed"}') == before + 3
    assert value('rollout_workers{stage="run"}') == 1
    # What waited for long was rung for again, and such a bell may still be there.
    wait_until(lambda: value('rollout_queue_depth{queue="init"}') == 0, 120, "an empty queue")
    assert value('rollout_stage_runs_total{stage="eval"}') >= 3
    assert value('rollout_gateway_requests_total{method="POST",route="/v1/rollouts",status="202"}') >= 1


def test_metrics_tell_of_the_sandboxes_of_each_node(stack, client):
    def started():
        return metric(stack.url, f'rollout_sandbox_events_total{{event="started",node="{NODE}"}}') or 0.0

    before = started()
    client.run([RolloutRequest(handler="in_tool", task={"command": "true"})])
    wait_until(lambda: started() > before, 120, "the node's sandboxes to be counted")


def test_the_openapi_document_has_every_route_and_no_other(stack):
    document = get(stack, "/openapi.json").json()
    described = {(method.upper(), path) for path, item in document["paths"].items() for method in item}
    app = create_app(Settings(redis_url="redis://127.0.0.1:1/0"))
    served = {
        (method, re.sub(r"<(?:\w+:)?(\w+)>", r"{\1}", rule.rule))
        for rule in app.url_map.iter_rules()
        for method in rule.methods - {"OPTIONS"} - ({"HEAD"} if "GET" in rule.methods else set())
        if rule.endpoint != "static"
    }
    assert described == served
    refs = set(re.findall(r"#/components/schemas/(\w+)", http.get(f"{stack.url}/openapi.json").text))
    assert refs <= set(document["components"]["schemas"])


def test_without_redis_the_gateway_says_503_and_lives():
    app = create_app(Settings(redis_url="redis://127.0.0.1:1/0"))
    http = app.test_client()
    assert http.get("/health").status_code == 200
    assert http.get("/ready").status_code == 503
    answer = http.post("/v1/rollouts", json={"handler": "noop"})
    assert answer.status_code == 503 and answer.headers["Retry-After"]
    assert answer.content_type == "application/problem+json"
