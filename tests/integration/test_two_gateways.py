"""Two gateways of one service: whatever a client begins at one goes on at the other.

They share a Redis and nothing else. Each call here goes to the one that did not answer the call before.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from rollout.suites.bundles import MEDIA_TYPE, pack
from services.gateway.auth import CACHE_S
from services.gateway.context import EXTENSION
from services.state.api_keys import Scope
from services.state.tenants import Tenant
from tests.helpers.stack import wait_until
from tests.helpers.tenants import World

PATIENCE_S = 120.0


class Pair(World):
    """Two gateways that take turns."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.other = self.start()

    def call(self, *args, **more):
        answer = super().call(*args, **more)
        self.app, self.other = self.other, self.app
        return answer


@pytest.fixture
def pair(server):
    pair = Pair(server.url)
    pair.key("a", Scope.SUBMIT, Scope.READ, Scope.ADMIN)
    for app in (pair.app, pair.other):
        app.extensions[EXTENSION].guard.forget()
    return pair


def test_a_submission_that_is_sent_again_to_the_other_one_is_the_same_rollout(pair):
    created = [pair.submit("a", id="r", task={}).json["rollouts"][0]["created"] for _ in range(2)]
    assert created == [True, False] and pair.redis.llen("init") == 1
    assert pair.submit("a", id="r", task={"reward": 1.0}).status_code == 409


def test_both_keep_one_account_of_a_tenant_s_rate_and_of_what_lives(pair):
    pair.tenants.set(Tenant(name="a", per_minute=2))
    assert [pair.submit("a").status_code for _ in range(3)] == [202, 202, 429]
    pair.tenants.set(Tenant(name="a", quota_live=3))
    wait_until(lambda: pair.submit("a").status_code == 202, PATIENCE_S, "both to know of the other quota")
    assert [pair.submit("a").status_code for _ in range(4)] == [429] * 4


def test_a_trainer_s_cursor_and_what_it_has_acknowledged_hold_at_the_other_one(pair):
    ids = [pair.submit("a", tags=["t"]).json["rollouts"][0]["id"] for _ in range(4)]
    for rollout_id in ids:
        assert pair.post(f"/v1/rollouts/{rollout_id}/cancel", "a").json["state"] == "cancelled"
    read, cursor = [], "0"
    for _ in ids:
        page = pair.get(f"/v1/results?cursor={cursor}&limit=1&tag=t", "a").json
        read += [item["id"] for item in page["rollouts"]]
        cursor = page["cursor"]
    assert read == ids
    answers = [pair.post("/v1/rollouts/ack", "a", {"ids": ids}).json for _ in range(2)]
    assert answers[0]["acknowledged"] == answers[1]["already_acknowledged"] == len(ids)


@pytest.mark.parametrize("path", ["/v1/results?cursor=$&wait=60", "/v1/rollouts/r?wait=60"])
def test_who_waits_at_one_is_woken_by_what_the_other_one_ends(pair, path):
    pair.submit("a", id="r")
    here, there = pair.app, pair.other
    waits = here.test_client()
    headers = {"Authorization": f"Bearer {pair.texts['a']}"}
    room = here.extensions[EXTENSION].waiting
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(waits.get, path, headers=headers)
        wait_until(lambda: room._by_name, PATIENCE_S, "the client to wait")
        assert there.test_client().post("/v1/rollouts/r/cancel", headers=headers).status_code == 200
        told = answer.result(PATIENCE_S).json
    assert "cancelled" in str(told)


def test_a_bundle_a_batch_and_a_webhook_of_one_are_the_other_one_s_too(pair, tmp_path):
    (tmp_path / "task.toml").write_text("version = '1.0'")
    bundle = pack(tmp_path)
    put = {"data": bundle.content, "headers": {"Content-Type": MEDIA_TYPE}}
    for code in (201, 200):
        assert pair.call("PUT", f"/v1/bundles/{bundle.digest}", "a", **put).status_code == code
    batch = {"id": "b", "prompts": [{"handler": "noop", "task": {}}], "groups": 1}
    codes = [pair.post("/v1/batches", "a", batch).status_code for _ in range(2)]
    assert codes[0] in (201, 202) and codes[1] in (200, codes[0])
    assert [pair.get("/v1/batches/b", "a").json["id"] for _ in range(2)] == ["b", "b"]


def test_a_key_that_is_made_or_revoked_counts_at_both_within_seconds(pair):
    assert pair.get("/v1/rollouts", "a").status_code == pair.get("/v1/rollouts", "a").status_code == 200
    pair.key("b")
    key = next(key for key in pair.keys.list() if key.tenant == "a")
    pair.keys.revoke(key.id)
    codes = lambda who: {pair.get("/v1/rollouts", who).status_code for _ in range(2)}  # noqa: E731
    wait_until(lambda: codes("a") == {401} and codes("b") == {200}, 20 * CACHE_S, "both to have heard of it")


def test_a_browser_s_session_holds_at_both(pair):
    at = {"base_url": "http://127.0.0.1:8080"}
    browser = pair.app.test_client()
    proof = browser.post("/v1/session", json={"key": pair.texts["a"]}, **at).json["proof"]
    cookie = browser.get_cookie("rollout_session_8080", "127.0.0.1").value
    other = pair.other.test_client()
    other.set_cookie("rollout_session_8080", cookie, domain="127.0.0.1")
    assert other.get("/v1/rollouts", headers={"X-Rollout-Session": proof}, **at).status_code == 200


def test_a_handler_that_was_announced_a_moment_ago_is_known_to_both(pair):
    assert [pair.submit("a").status_code for _ in range(2)] == [202, 202]
    pair.gate.fleet.put_handlers([pair.gate.fleet.handlers()["noop"].model_copy(update={"name": "new"})])
    answers = [pair.post("/v1/rollouts", "a", {"handler": "new"}).status_code for _ in range(2)]
    assert answers == [202, 202]


def test_what_is_counted_of_rollouts_is_the_same_at_both(pair):
    for _ in range(3):
        pair.submit("a")
    lines = [
        [line for line in pair.get("/metrics", "a").text.splitlines() if line.startswith("rollout_rollouts")]
        for _ in range(2)
    ]
    assert lines[0] and lines[0] == lines[1]
