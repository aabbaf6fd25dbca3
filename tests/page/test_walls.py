"""Another tenant's rollouts do not exist in the page, by no way of asking; and a key's scopes hold in it."""

from __future__ import annotations

import re
import time

import httpx
import pytest
from playwright.sync_api import expect

from services.gateway.auth import CACHE_S
from services.state.api_keys import KeyStore, Scope
from services.state.redis import connect
from tests.helpers.browser import sign_in
from tests.helpers.page_world import OTHER


@pytest.fixture
def theirs(world):
    """Calls with the other tenant's session."""
    with httpx.Client(base_url=world.url, timeout=60) as client:
        answer = client.post("/v1/session", json={"key": world.other_key}).json()
        client.headers["X-Rollout-Session"] = answer["proof"]
        assert answer["tenant"] == OTHER
        yield client


def events(client: httpx.Client, params: dict[str, str], seconds: float) -> str:
    """What a live stream says for so long."""
    said = ""
    try:
        with client.stream("GET", "/v1/live", params=params, timeout=seconds) as stream:
            if stream.status_code != 200:
                return f"{stream.status_code}"
            for text in stream.iter_text():
                said += text
                if len(said) > 1_000_000:
                    break
    except httpx.ReadTimeout:
        pass
    return said


def test_a_tenant_sees_its_own_rollouts_alone(open_view, world):
    page = open_view("rollouts", key=world.other_key)
    main = page.get_by_role("main")
    expect(main.get_by_role("link", name=re.compile("theirs")).first).to_be_visible()
    for name in ("mend-calc.0", "broken", "branched"):
        expect(main.get_by_text(name)).to_have_count(0)


@pytest.mark.parametrize("route", ["rollouts/mend-calc.0", "groups/mend-calc", "batches/draws"])
def test_anothers_by_its_address_is_not_there(open_view, world, route):
    page = open_view(route, key=world.other_key, accept="404")
    said = re.compile("not there|no such|not known|not found|nothing|no rollout|unknown", re.IGNORECASE)
    expect(page.get_by_role("main").get_by_text(said).first).to_be_visible()
    text = page.locator("body").inner_text()
    assert "I look around" not in text and "uniform" not in text and "twice(2)" not in text


@pytest.mark.parametrize(
    "path",
    [
        "/v1/rollouts/mend-calc.0",
        "/v1/rollouts/mend-calc.0/page",
        "/v1/groups/mend-calc/page",
        "/v1/batches/draws",
        "/v1/reports/run-7",
    ],
)
def test_anothers_is_404_to_a_session(theirs, path):
    assert theirs.get(path).status_code == 404


def test_a_live_stream_tells_nothing_of_another_tenants(theirs, world):
    live = world.running()
    params = {"topics": "overview,batches,reports", "rollout": live, "ids": f"{live},mend-calc.0,theirs"}
    said = events(theirs, params, 3)
    assert live not in said and "tick" not in said and "mend-calc.0" not in said
    assert live not in events(theirs, {"ids": f"{live},theirs"}, 2)
    world.client.cancel(live)


def test_lists_counts_and_reports_are_those_of_the_tenant(theirs):
    for path in ("/v1/rollouts", "/v1/rollouts?group_id=mend-calc", "/v1/batches", "/v1/reports"):
        said = theirs.get(path).text
        assert "mend-calc" not in said and "draws" not in said and "run-7" not in said


def test_a_reader_is_not_offered_a_cancel_that_works(contexts, world):
    _, reader = world.new_key(Scope.READ)
    rollout_id = world.running()
    context, witness = contexts(key=None)
    witness.accept("403")
    sign_in(page := context.new_page(), world.url, reader)
    page.goto(f"{world.url}/#/rollouts/{rollout_id}")
    expect(page.get_by_role("main").get_by_text("running").first).to_be_visible()
    button = page.get_by_role("button", name="Cancel", exact=False)
    if button.count() and button.first.is_enabled():
        button.first.click()
        page.get_by_role("dialog").get_by_role(
            "button", name=re.compile("cancel", re.IGNORECASE)
        ).last.click()
        expect(page.get_by_text("scope", exact=False).first).to_be_visible()
    assert world.client.get(rollout_id, include="summary").state == "running"
    world.client.cancel(rollout_id)


def test_an_admin_looks_at_everybodys(open_view, world):
    page = open_view("overview")
    for query, name in (("tag=secret-of-other", "theirs"), ("group_id=mend-calc", "mend-calc.0")):
        page.goto(f"{world.url}/#/rollouts?tenant=*&{query}")
        expect(page.get_by_role("main").get_by_role("link", name=name, exact=True).first).to_be_visible()


def test_a_session_ends_when_its_key_is_revoked(contexts, world):
    key_id, text = world.new_key(Scope.READ)
    context, witness = contexts(key=None)
    witness.accept("401")
    sign_in(page := context.new_page(), world.url, text)
    page.goto(f"{world.url}/#/rollouts?state=failed")
    expect(page.get_by_role("link", name=re.compile("broken")).first).to_be_visible()
    with connect(world.stack.redis.url) as redis:
        KeyStore(redis).revoke(key_id)
    time.sleep(CACHE_S + 0.5)
    page.reload()
    expect(page.get_by_label("key", exact=False).first).to_be_visible()
