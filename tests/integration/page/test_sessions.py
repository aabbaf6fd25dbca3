"""Sessions of the page: a key entered once, then a cookie and a proof, of which neither counts alone."""

from __future__ import annotations

import re
import threading

import pytest

from services.state import keys as names
from services.state import sessions
from services.state.api_keys import Scope

AT = "http://127.0.0.1:8080"
COOKIE = "rollout_session_8080"
OPEN = "/v1/rollouts"


class Browser:
    """Cookies of one browser, and the proof that the page keeps."""

    def __init__(self, world, at=AT):
        self.client, self.at, self.proof = world.app.test_client(), at, None

    def log_in(self, key, **more):
        answer = self.client.post("/v1/session", json={"key": key}, base_url=self.at, **more)
        if answer.status_code == 200:
            self.proof = answer.json["proof"]
        return answer

    def call(self, path=OPEN, method="GET", **more):
        headers = {"X-Rollout-Session": self.proof, **more.pop("headers", {})}
        headers = {name: value for name, value in headers.items() if value is not None}
        return self.client.open(path, method=method, base_url=self.at, headers=headers, **more)

    @property
    def token(self):
        return self.client.get_cookie(COOKIE, "127.0.0.1").value


@pytest.fixture
def browser(world):
    world.key("a")
    browser = Browser(world)
    assert browser.log_in(world.texts["a"]).status_code == 200
    return browser


def test_a_key_entered_once_becomes_a_cookie_that_no_script_reads_and_a_proof(world):
    world.key("a")
    answer = Browser(world).log_in(f" {world.texts['a']}\n")
    assert answer.json["tenant"] == "a" and answer.json["scopes"] == ["read", "submit"]
    (cookie,) = answer.headers.getlist("Set-Cookie")
    name, _, rest = cookie.partition("=")
    assert name == COOKIE and {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(rest.split("; "))
    assert "Domain" not in rest and "Secure" not in rest and answer.headers["Cache-Control"] == "no-store"
    assert rest.split(";")[0] not in answer.text and "rlt_" not in answer.text
    safe = Browser(world, "https://127.0.0.1").log_in(world.texts["a"]).headers["Set-Cookie"]
    assert safe.startswith("rollout_session_443=") and "Secure" in safe
    behind = {"Origin": "https://127.0.0.1:8080", "Sec-Fetch-Site": "same-origin"}
    answer = Browser(world).log_in(world.texts["a"], headers=behind)
    assert "Secure" in answer.headers["Set-Cookie"], "a proxy ends TLS"


def test_redis_has_neither_text_of_a_session(world, browser):
    assert world.redis.get(names.session(sessions.digest_of(browser.token)))
    kept = "".join(str(world.redis.dump(key)) for key in world.redis.keys("session*"))
    assert browser.token not in kept and browser.proof not in kept
    (name,) = world.redis.keys("session:*")
    assert sessions.LIFETIME_S - 60 < world.redis.ttl(name) <= sessions.LIFETIME_S


def test_a_session_may_what_its_key_may(world, browser):
    (made,) = world.submit("a").json["rollouts"]
    world.key("b")
    (other,) = world.submit("b").json["rollouts"]
    answer = browser.call(f"/v1/rollouts/{made['id']}?include=summary")
    assert answer.status_code == 200
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert browser.call(f"/v1/rollouts/{other['id']}").status_code == 404, "a tenant sees its own"
    assert browser.call(f"/v1/rollouts/{made['id']}/cancel", "POST").status_code == 200
    assert browser.call("/v1/backends/x/drain", "POST").status_code == 403
    assert browser.call("/metrics").status_code == 403
    assert browser.call("/v1/rollouts?tenant=b").status_code == 403
    assert "Cache-Control" not in world.get(OPEN, "a").headers, "as before for who sends the key"


@pytest.mark.parametrize(
    ("cookie", "proof", "title"),
    [
        (True, None, "Session incomplete"),
        (False, True, "Session incomplete"),
        (True, "0" * 64, "Session over"),
        (True, "", "Session over"),
        (True, "é" * 3, "Session over"),
        ("0" * 64, True, "Session over"),
        ("x", True, "Session over"),
        ("a" * 3000, True, "Session over"),
    ],
)
def test_cookie_or_proof_alone_or_a_wrong_one_is_a_401(world, browser, cookie, proof, title):
    if cookie is not True:
        browser.client.delete_cookie(COOKIE, domain="127.0.0.1")
    if isinstance(cookie, str):
        browser.client.set_cookie(COOKIE, cookie, domain="127.0.0.1")
    if proof is not True:
        browser.proof = proof
    answer = browser.call()
    assert (answer.status_code, answer.json["title"]) == (401, title)
    assert "log in again" in answer.json["detail"]
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")


def test_the_cookie_of_another_port_and_a_mixture_of_two_sessions_are_not_taken(world, browser):
    other = Browser(world)
    other.log_in(world.texts["a"])
    assert other.call().status_code == browser.call().status_code == 200
    mixed = browser.call(headers={"X-Rollout-Session": other.proof})
    assert mixed.status_code == 401
    browser.at = "http://127.0.0.1:9090"
    assert browser.call().json["title"] == "Session incomplete"


def test_a_key_in_the_header_counts_before_any_cookie(world, browser):
    world.key("chief", Scope.ADMIN)
    bearer = {"Authorization": f"Bearer {world.texts['chief']}"}
    assert browser.call("/v1/session", headers=bearer).json["tenant"] == "chief"
    wrong = browser.call(headers={"Authorization": "Bearer no"})
    assert wrong.status_code == 401
    foreign = world.get(OPEN, headers={"Cookie": "theme=dark"})
    assert foreign.json["title"] == "API key missing", "a cookie of another program is none"


@pytest.mark.parametrize("key", ["", "rlt_x", "rlt_" + "0" * 12 + "_" + "0" * 64, "x" * 200])
def test_a_wrong_key_begins_nothing_and_is_counted_and_not_repeated(world, key):
    world.key("chief", Scope.ADMIN)

    def refused():
        return float(re.search(r'refused_total{reason="key"} (\S+)', world.get("/metrics", "chief").text)[1])

    before = refused()
    answer = Browser(world).log_in(key)
    assert answer.status_code == 401 and answer.json["title"] == "API key not valid"
    assert "Set-Cookie" not in answer.headers and (not key or key not in answer.text)
    assert refused() == before + 1
    assert world.redis.keys("session*") == []


def test_a_key_that_may_not_read_and_one_that_has_ended_begin_nothing(world):
    sender = world.key("sender", Scope.SUBMIT)
    answer = Browser(world).log_in(sender)
    assert answer.status_code == 403 and "needs the scope 'read'" in answer.json["detail"]
    key, text = world.keys.create("a", [Scope.READ])
    world.keys.revoke(key.id)
    answer = Browser(world).log_in(text)
    assert answer.status_code == 401 and "revoked" in answer.json["detail"]
    assert Browser(world).log_in("x" * 201).status_code == 400
    assert world.redis.keys("session*") == []


def test_a_session_ends_by_itself_by_its_reader_and_with_its_key(world):
    key, text = world.keys.create("a", [Scope.READ])
    one, two, three = (Browser(world) for _ in range(3))
    for browser in (one, two, three):
        browser.log_in(text)
    assert one.call("/v1/session", "DELETE").status_code == 204
    assert one.client.get_cookie(COOKIE, "127.0.0.1") is None
    assert [item.call().status_code for item in (one, two)] == [401, 200]
    world.redis.delete(names.session(sessions.digest_of(two.token)))  # as when it expires
    assert two.call().json["title"] == "Session over"
    world.keys.revoke(key.id)
    answer = three.call()
    assert answer.status_code == 401 and "revoked" in answer.json["detail"]


def test_a_session_never_outlives_its_key(world):
    _, text = world.keys.create("a", [Scope.READ], lifetime_s=60)
    browser = Browser(world)
    ends = browser.log_in(text).json["expires_at"]
    assert browser.call("/v1/session").json["expires_at"] == ends
    (name,) = world.redis.keys("session:*")
    assert 0 < world.redis.ttl(name) <= 60


def test_no_text_of_a_session_or_its_key_is_logged(world, capfd, caplog):
    browser = Browser(world)
    browser.log_in(world.key("a"))
    browser.call()
    browser.call(headers={"X-Rollout-Session": browser.proof[::-1]})
    logged = "".join(capfd.readouterr()) + caplog.text
    assert "/v1/session" in logged
    for secret in (browser.token, browser.proof, browser.proof[::-1], world.texts["a"][17:]):
        assert secret not in logged


def test_the_oldest_of_very_many_sessions_of_a_key_gives_way(world, monkeypatch):
    monkeypatch.setattr(sessions, "MOST", 2)
    world.key("a")
    browsers = [Browser(world) for _ in range(3)]
    for browser in browsers:
        browser.log_in(world.texts["a"])
    assert [browser.call().status_code for browser in browsers] == [401, 200, 200]


def test_whoever_sends_the_key_itself_has_no_session_to_end(world):
    world.key("a")
    assert world.get("/v1/session", "a").json == {
        "tenant": "a",
        "scopes": ["read", "submit"],
        "expires_at": None,
    }
    assert world.call("DELETE", "/v1/session", "a").status_code == 404


@pytest.mark.parametrize("end", ["key", "session"])
def test_a_stream_ends_with_its_session_and_with_its_key(world, end):
    key, text = world.keys.create("a", [Scope.READ])
    world.app = world.start(sse_heartbeat_s=0.1)
    browser = Browser(world)
    browser.log_in(text)
    stream = iter(browser.call("/v1/results/stream").response)
    assert next(stream)
    rest: list[bytes] = []
    reader = threading.Thread(target=lambda: rest.extend(stream), daemon=True)
    reader.start()
    if end == "key":
        world.keys.revoke(key.id)
    else:
        assert browser.call("/v1/session", "DELETE").status_code == 204
    reader.join(30)
    assert not reader.is_alive()


def test_who_has_no_key_sends_little(world):
    answer = world.call("POST", "/v1/session", json={"key": "x" * 5000})
    assert answer.status_code == 413 and "Content-Length" in answer.json["detail"]


# -- from pages of others ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://127.0.0.1:9090", "Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "null"},
    ],
)
def test_a_page_of_another_site_or_port_gets_nothing_with_the_cookie(world, browser, headers):
    (made,) = world.submit("a").json["rollouts"]
    cancel = f"/v1/rollouts/{made['id']}/cancel"
    for proof in (None, browser.proof):
        extra = {**headers, "X-Rollout-Session": proof}
        assert browser.call(headers=dict(extra)).status_code == 403
        assert browser.call(cancel, "POST", headers=dict(extra)).status_code == 403
    login = Browser(world).log_in(world.texts["a"], headers=headers)
    assert login.status_code == 403 and "Set-Cookie" not in login.headers
    form = browser.client.post(
        "/v1/session", data={"key": world.texts["a"]}, base_url=AT, content_type="text/plain"
    )
    assert form.status_code == 415
    assert world.get(f"/v1/rollouts/{made['id']}", "a").json["state"] == "queued"


def test_a_name_that_was_made_to_point_here_has_neither_cookie_nor_proof(world, browser):
    rebound = browser.call(headers={"Host": "evil.example:8080"})
    assert rebound.status_code == 421
    world.app = world.start(gateway_host="0.0.0.0")  # whom others reach knows no names
    evil = Browser(world, "http://evil.example:8080")
    assert evil.call().json["title"] == "API key missing"


def test_the_port_that_needs_no_key_begins_no_session(world):
    world.key("a")
    world.app = world.start(compat_port=8006, compat_tenant="trainer")
    assert Browser(world, "http://127.0.0.1:8006").log_in(world.texts["a"]).status_code == 404
