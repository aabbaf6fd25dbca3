"""Web pages of other sites at both ports, and the port that needs no key."""

from __future__ import annotations

import pytest

from services.gateway import door, refusals
from services.gateway.compat import port
from services.settings import Settings, SettingsError
from services.state.api_keys import Scope
from services.state.jobs import JobStore
from services.state.tenants import Tenant

COMPAT = {"compat_port": 8006, "compat_tenant": "trainer"}
JOB = {"instance": {"data_source": "noop"}}


@pytest.fixture
def ported(world):
    """The same gateway with a port that needs no key."""
    world.app = world.start(**COMPAT)
    world.gate = world.app.extensions["rollout"]
    return world


def at_port(world, method: str, path: str, **more):
    more.setdefault("headers", {})
    return world.call(method, path, base_url="http://127.0.0.1:8006", **more)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://localhost"}, 200),
        ({"Origin": "https://localhost"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://localhost:3000"}, 403),
        ({"Origin": "http://localhost.evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "Same-Site"}, 403),
        ({"Origin": "http://evil.example", "Sec-Fetch-Site": "same-origin"}, 403),
    ],
)
def test_pages_of_other_sites_are_refused_with_any_key(world, headers, status):
    world.key("a", Scope.ADMIN)
    assert world.get("/v1/status", "a", headers=dict(headers)).status_code == status
    assert world.get("/health", headers=dict(headers)).status_code == 200, "it tells nothing"
    posted = world.call("POST", "/v1/rollouts", "a", json={"handler": "noop"}, headers=dict(headers))
    assert (posted.status_code < 300) == (status == 200), posted.text
    assert not any(name.startswith("Access-Control") for name, _ in posted.headers)


@pytest.mark.parametrize(
    ("kind", "body", "status"),
    [
        ("application/json", b"{}", 400),
        ("application/json; charset=utf-8", b"{}", 400),
        ("text/plain", b"{}", 415),
        ("text/plain", b"", 415),
        ("application/x-www-form-urlencoded", b"a=b", 415),
        ("multipart/form-data; boundary=x", b"", 415),
        ("application/octet-stream", b"{}", 415),
        (None, b"{}", 415),
    ],
)
def test_a_body_is_json(world, kind, body, status):
    world.key("a", Scope.ADMIN)
    assert world.call("POST", "/v1/rollouts", "a", data=body, content_type=kind).status_code == status
    if body == b"" and kind != "application/json":
        assert world.call("POST", "/v1/backends/x/drain", "a", content_type=kind).status_code == 415
    # aiohttp names a type of bodies that it does not send.
    assert (
        world.call("POST", "/v1/backends/x/drain", "a", content_type="application/octet-stream").status_code
        == 404
    )
    assert world.call("POST", "/v1/backends/x/drain", "a").status_code == 404


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("10.1.2.3", 200),
        ("localhost", 200),
        ("here.localhost:1", 200),
        ("proxy.example", 200),
        ("Proxy.Example:443", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("[::1", 421),
    ],
)
def test_on_loopback_the_host_must_be_known(world, host, status):
    world.key("a")
    world.app = world.start(gateway_names="proxy.example, other")
    assert world.get("/v1/status", "a", headers={"Host": host}).status_code == status
    own = next(iter(door.own_names()))
    assert world.get("/v1/status", "a", headers={"Host": own}).status_code == 200
    world.app = world.start(gateway_host="0.0.0.0")
    assert world.get("/v1/status", "a", headers={"Host": host}).status_code == 200, "no page has the key"


def test_what_is_turned_away_is_counted_and_said(world, caplog, monkeypatch):
    monkeypatch.setattr(refusals, "QUIET_S", 0.0)
    world.key("a", Scope.ADMIN)
    world.get("/v1/status", "a", headers={"Origin": "http://evil.example"})
    world.get("/v1/status")
    text = world.get("/metrics", "a").text
    for reason in ("browser", "key"):
        (line,) = (row for row in text.splitlines() if f'refused_total{{reason="{reason}"}}' in row)
        assert float(line.split()[-1]) >= 1
    assert "http://evil.example" in caplog.text


# -- the port ----------------------------------------------------------------------------------


def test_the_port_serves_the_compatible_routes_and_no_others(ported):
    seen = set()
    for rule in ported.app.url_map.iter_rules():
        for method in rule.methods - {"HEAD", "OPTIONS"}:
            path = rule.rule
            for name in rule.arguments:
                path = path.replace(f"<{name}>", "x").replace(f"<path:{name}>", "x")
            answer = at_port(ported, method, path, **({"json": {}} if method == "POST" else {}))
            if answer.status_code not in (404, 405):
                seen.add(path)
    assert seen == {
        *("/", "/health", "/run", "/v1/responses", "/aggregate_metrics"),
        *("/start", "/stop", "/process", "/cancel", "/status", "/add_llm_server", "/clear_llm_server"),
    }
    for path in ("//v1/backends", "/status/../v1/backends"):
        assert at_port(ported, "GET", path).status_code == 404
    assert ported.get("/status").status_code == 401, "the ordinary port needs a key for them"
    assert at_port(ported, "GET", "/v1/backends", headers={"Host": "127.0.0.1:8080"}).status_code == 404


def test_whoever_comes_by_the_port_is_its_tenant_with_its_rights_and_no_more(ported):
    ported.key("other", Scope.ADMIN)
    ported.tenants.set(Tenant(name="trainer", handlers=("boxed",)))
    bearer = {"Authorization": f"Bearer {ported.texts['other']}"}
    answer = at_port(ported, "POST", "/process", json=JOB, headers=bearer)
    assert answer.status_code == 400 and "noop" in answer.text, "a key makes nobody another tenant there"
    ported.tenants.set(Tenant(name="trainer", quota_live=0))
    refused = at_port(ported, "POST", "/process", json=JOB)
    assert refused.status_code == 403 and "quota" in refused.text
    assert at_port(ported, "GET", "/status?tenant=other", headers=bearer).json["pending_jobs"] == 0
    (new,) = ported.submit("other").json["rollouts"]
    ported.gate.jobs.claim(JobStore.key("other", "prorl", "0", "theirs"), new["id"], "body", 60.0)
    named = {**bearer, "X-Tenant": "other"}
    answer = at_port(ported, "POST", "/cancel?tenant=other", json={"job_id": "theirs"}, headers=named)
    assert answer.json["status"] == "unknown"
    answer = ported.post("/cancel", "other", {"job_id": "theirs"})
    assert answer.json["status"] == "cancelled", "it is there, and its tenant's"


def test_llm_servers_may_be_closed_there(world):
    world.app = world.start(**COMPAT, compat_servers=False)
    for path in ("/add_llm_server", "/clear_llm_server"):
        answer = at_port(world, "POST", path, json={"address": "http://127.0.0.1:9/v1"})
        assert answer.status_code == 403 and "needs a key" in answer.json["detail"]
    world.app = world.start(**COMPAT)
    answer = at_port(world, "POST", "/add_llm_server", json={"address": "http://127.0.0.1:9/v1"})
    assert answer.status_code == 400, "nobody listens there"


def test_the_port_is_said_loudly_and_shown(ported, capfd):
    ported.start(**COMPAT)
    assert "NO KEY IS NEEDED AT 127.0.0.1:8006" in capfd.readouterr().err
    ported.key("a")
    assert ported.get("/v1/status", "a").json["compat"] == {
        "address": "127.0.0.1:8006",
        "tenant": "trainer",
        "servers": True,
    }


def test_there_is_no_such_port_by_default(world):
    assert port.Compat.of(Settings()) is None
    world.key("a")
    assert world.get("/v1/status", "a").json["compat"] is None
    assert at_port(world, "GET", "/status").status_code == 401


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"compat_port": 8006}, "say whose it is: set ROLLOUT_COMPAT_TENANT"),
        ({"compat_tenant": "a"}, "has no port: set ROLLOUT_COMPAT_PORT"),
        ({"compat_port": 8080, "compat_tenant": "a"}, "the gateway's own port"),
        ({"compat_port": 8006, "compat_tenant": "Team A"}, "ROLLOUT_COMPAT_TENANT: tenant 'Team A'"),
    ],
)
def test_half_a_port_is_refused_at_start(world, settings, says):
    with pytest.raises(SettingsError, match=says):
        world.start(**settings)
