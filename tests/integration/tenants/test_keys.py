"""Keys and scopes: who is answered, and what each may ask for."""

from __future__ import annotations

import threading

import pytest

from services.gateway import auth
from services.state import keys as names
from services.state.api_keys import Scope
from tests.helpers.stack import wait_until
from tests.helpers.tenants import World


@pytest.mark.parametrize("address", ["127.0.0.1", "127.3.2.1", "::1", "::ffff:127.0.0.1", "10.0.0.7", ""])
def test_before_the_first_key_everybody_is_refused_and_told_how_to_make_one(world, address, capfd):
    answer = world.get("/v1/status", environ_base={"REMOTE_ADDR": address})
    assert answer.status_code == 401
    assert "rollout keys create TENANT --scope admin" in answer.json["detail"]
    assert world.submit(None).status_code == world.get("/metrics").status_code == 401
    assert world.get("/health", environ_base={"REMOTE_ADDR": address}).status_code == 200
    world.start()
    assert "no API key is configured, so every call is refused" in capfd.readouterr().err


def test_when_the_keys_are_lost_the_gateway_is_closed_and_not_open(world):
    world.key("a")
    assert world.get("/v1/status", "a").status_code == 200
    world.redis.delete(names.API_KEYS, names.ACCESS_VERSION)
    assert world.get("/v1/status", "a").status_code == world.get("/v1/status").status_code == 401


def test_the_revocation_of_the_last_key_does_not_open_the_gateway(world):
    key, _ = world.keys.create("a", [Scope.ADMIN])
    world.keys.revoke(key.id)
    assert world.get("/v1/status").status_code == 401


@pytest.mark.parametrize(("lifetime_s", "works_s"), [(None, 3600), (60, 60), (86400, 3600)])
def test_a_rotated_key_works_for_its_grace_and_never_past_its_own_end(world, lifetime_s, works_s):
    made, _ = world.keys.create("a", [Scope.READ], lifetime_s=lifetime_s)
    new, _ = world.keys.rotate(made.id, 3600)
    (old,) = (key for key in world.keys.list() if key.id == made.id)
    since = made if works_s == lifetime_s else new
    assert old.expires_at - since.created_at == pytest.approx(works_s, abs=5)
    assert (new.lifetime_s, new.scopes) == (lifetime_s, {Scope.READ})
    lasts = new.expires_at and new.expires_at - new.created_at
    assert lasts == (lifetime_s and pytest.approx(lifetime_s, abs=5))


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Basic dXNlcjpwYXNz",
        "rlt_{id}_{secret}",
        "Bearer rlt_{id}_",
        "Bearer rlt_{id}_{secret}0",
        "Bearer rlt_{id}_{wrong}",
        "Bearer rlt_000000000000_{secret}",
        "Bearer rlt_{id}_{secret}, Bearer rlt_{id}_{secret}",
        "Bearer\trlt_{id}_{secret}",
        "Bearer rlt_{id}_{upper}",
        "Bearer \u00e9\u00ff",
        "Bearer " + "a" * 100_000,
    ],
)
def test_a_bad_authorization_header_is_a_401_that_repeats_nothing(world, header):
    _, id_, secret = world.key("a").split("_")
    text = header.format(id=id_, secret=secret, wrong="f" * 64, upper=secret.upper())
    answer = world.get("/v1/status", headers={"Authorization": text})
    assert answer.status_code == 401
    assert answer.content_type == "application/problem+json"
    assert answer.headers["WWW-Authenticate"].startswith('Bearer realm="rollout"')
    assert secret not in answer.text and secret.upper() not in answer.text and "aaaa" not in answer.text
    assert (
        world.get("/v1/status", headers={"Authorization": f"bearer  rlt_{id_}_{secret}"}).status_code == 200
    )


def test_a_missing_scope_is_named(world):
    world.key("reader", Scope.READ)
    answer = world.submit("reader")
    assert answer.status_code == 403
    assert "needs the scope 'submit'" in answer.json["detail"] and "has: read" in answer.json["detail"]
    assert 'scope="submit"' in answer.headers["WWW-Authenticate"]


def test_metrics_are_for_admins_and_for_a_key_that_reads_nothing_else(world):
    for name in (Scope.READ, Scope.ADMIN, Scope.METRICS):
        world.key(name, name)
    assert world.get("/metrics").status_code == 401
    assert world.get("/metrics", Scope.READ).status_code == 403
    assert world.get("/metrics", Scope.ADMIN).status_code == 200
    assert world.get("/metrics", Scope.METRICS).status_code == 200
    assert world.get("/v1/status", Scope.METRICS).status_code == 403


def test_keys_are_read_again_after_the_cache_s_time_and_not_before(server, monkeypatch):
    monkeypatch.setattr(auth, "CACHE_S", 1000.0)
    world = World(server.url)
    key, text = world.keys.create("a", [Scope.READ])
    world.app = world.start()
    assert world.get("/v1/handlers", text).status_code == 200
    world.keys.revoke(key.id)
    assert world.get("/v1/handlers", text).status_code == 200
    monkeypatch.setattr(auth, "CACHE_S", 0.2)
    wait_until(lambda: world.get("/v1/handlers", text).status_code == 401, 120, "the revocation to act")


def test_a_long_poll_does_not_answer_a_key_revoked_meanwhile(world):
    key, text = world.keys.create("a", [Scope.READ, Scope.SUBMIT])
    answers = []
    path = "/v1/results?cursor=$&wait=60"
    reader = threading.Thread(target=lambda: answers.append(world.get(path, text)))
    reader.start()
    wait_until(lambda: world.gate.waiting.open, 120, "the reader to wait")
    (made,) = world.submit(text).json["rollouts"]
    world.keys.revoke(key.id)
    world.gate.dispatcher.cancel(made["id"])
    reader.join(30)
    assert answers[0].status_code == 401 and made["id"] not in answers[0].text


def test_a_stream_ends_when_its_key_is_revoked(world):
    key, text = world.keys.create("a", [Scope.READ])
    world.app = world.start(sse_heartbeat_s=0.1)
    stream = iter(world.get("/v1/results/stream", text).response)
    assert next(stream)
    rest: list[bytes] = []
    reader = threading.Thread(target=lambda: rest.extend(stream), daemon=True)
    reader.start()
    world.keys.revoke(key.id)
    reader.join(30)
    assert not reader.is_alive()
