"""Rights, over every route there is: what a key lacks it cannot do, and what is another's it cannot see."""

from __future__ import annotations

import json
import re
from enum import StrEnum
from urllib.parse import quote

import pytest
from flask import Flask
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from rollout.schema import Backend
from services.gateway import auth
from services.gateway.auth import scope_of
from services.gateway.http import operation
from services.state import keys as names
from services.state.api_keys import TRAIN, Scope
from services.state.tenants import Tenant
from tests.helpers.tenants import World

SHARED = "read operate"
SEEN = f"read {TRAIN}"
DEFAULT = "train:default"
ROUTES = {
    "GET /": None,
    "POST /add_llm_server": "operate",
    "POST /aggregate_metrics": "read",
    "POST /cancel": "submit",
    "POST /clear_llm_server": "operate",
    "GET /health": None,
    "GET /metrics": "metrics",
    "GET /openapi.json": None,
    "GET /page/<path:name>": None,
    "POST /process": "submit",
    "GET /ready": None,
    "POST /run": "submit",
    "POST /start": "submit",
    "GET /static/<path:filename>": "read",
    "GET /status": "read",
    "POST /stop": "submit",
    "GET /v1/backends": SHARED,
    "POST /v1/backends": "operate",
    "GET /v1/backends/<backend_id>": SHARED,
    "DELETE /v1/backends/<backend_id>": "operate",
    "POST /v1/backends/<backend_id>/drain": "operate",
    "GET /v1/batches": "read",
    "POST /v1/batches": "submit",
    "GET /v1/batches/<batch_id>": "read",
    "POST /v1/batches/<batch_id>/cancel": "submit",
    "GET /v1/batches/<batch_id>/groups": "read",
    "POST /v1/batches/<batch_id>/pause": "submit",
    "POST /v1/batches/<batch_id>/prompts": "submit",
    "POST /v1/batches/<batch_id>/resume": "submit",
    "PUT /v1/bundles/<digest>": "submit",
    "GET /v1/completions": "read",
    "GET /v1/completions/stream": "read",
    "GET /v1/fleet": SHARED,
    "GET /v1/groups/<group_id>/page": "read",
    "GET /v1/handlers": "read",
    "GET /v1/live": "read",
    "GET /v1/policies": SHARED,
    "GET /v1/policies/<name>": SEEN,
    "POST /v1/policies/<name>": TRAIN,
    "DELETE /v1/policies/<name>": TRAIN,
    "GET /v1/policies/<name>/updates/<update_id>": SEEN,
    "GET /v1/policy": SEEN,
    "POST /v1/policy": TRAIN,
    "DELETE /v1/policy": TRAIN,
    "GET /v1/policy/updates/<update_id>": SEEN,
    "GET /v1/reports": "read",
    "POST /v1/reports": "submit",
    "GET /v1/reports/<run>": "read",
    "POST /v1/responses": "submit",
    "GET /v1/results": "read",
    "GET /v1/results/stream": "read",
    "GET /v1/rollouts": "read",
    "POST /v1/rollouts": "submit",
    "POST /v1/rollouts/ack": "read",
    "POST /v1/rollouts/cancel": "submit",
    "GET /v1/rollouts/<rollout_id>": "read",
    "GET /v1/rollouts/<rollout_id>/agent": "submit",
    "POST /v1/rollouts/<rollout_id>/cancel": "submit",
    "GET /v1/rollouts/<rollout_id>/checkpoints": "read",
    "GET /v1/rollouts/<rollout_id>/page": "read",
    "GET /v1/session": "read",
    "POST /v1/session": None,
    "DELETE /v1/session": "read",
    "GET /v1/status": SHARED,
    "GET /v1/tokenizers/<digest>": "read",
    "GET /v1/webhooks": "admin",
    "POST /v1/webhooks/redeliver": "admin",
}
"""What each needs: one of these scopes; None = nothing. The name is that of the address, else `default`."""

TRAINED = {"train:a", "train:b", DEFAULT}
HELD = {
    "nothing": set(),
    "submit": {"submit"},
    "read": {"read"},
    "metrics": {"metrics"},
    "train:a": {"train:a"},
    DEFAULT: {DEFAULT},
    "submit,read,train:a": {"submit", "read", "train:a"},
    "operate": {"operate", "metrics", *TRAINED},
    "submit,read,operate": {"submit", "read", "operate", "metrics", *TRAINED},
    "admin": {*Scope, *TRAINED},
}
"""Scopes of a key, and all that it may by them."""

VICTIM, ME = "victim", "me"
MARK = "mark-of-the-victim"
SERVES = {"model": "m", "tokenizer": "t", "max_model_len": 100}
ENGINES = [
    Backend(id="engine", url="http://127.0.0.1:9", policies={"a": "m", "b": "n"}, **SERVES),
    Backend(id="other", url="http://127.0.0.1:19", **SERVES),
]
PLACES = {
    "backend_id": "engine",
    "batch_id": "its-batch",
    "digest": "0" * 64,
    "group_id": "its-group",
    "rollout_id": "its-rollout",
    "run": "its-run",
    "update_id": "none",
    "filename": "none",
}
BODIES = {
    "POST /v1/backends": {"url": "http://127.0.0.1:9", "policies": {"b": None}},
    "POST /v1/policy": {"version": "2"},
    "POST /v1/policies/<name>": {"version": "2"},
    "POST /v1/rollouts": {"handler": "noop", "policy": "b"},
    "POST /v1/rollouts/cancel": {"tag": MARK},
    "POST /v1/rollouts/ack": {"ids": ["its-rollout"]},
    "POST /v1/batches": {"prompts": [{"handler": "noop", "policy": "b"}], "n": 2, "groups": 1},
    "POST /v1/reports": {"run": "its-run", "step": 1, "metrics": {"x": 1.0}},
    "POST /v1/webhooks/redeliver": {"ids": ["its-rollout"]},
}
ENDLESS = {
    "GET /v1/completions/stream": "cursor=no",
    "GET /v1/results/stream": "cursor=no",
    "GET /v1/live": "ids=",
}
"""Streams, and a query with which they refuse instead."""


@pytest.fixture
def world(world) -> World:
    """A service with another tenant's things in it, and a key of ours for each entry of `HELD`."""
    world.key(VICTIM)
    its = {"tags": [MARK], "metadata": {"note": MARK}, "handler": "noop"}
    assert world.submit(VICTIM, **its, id="its-rollout", group_id="its-group").status_code == 202
    batch = {"id": "its-batch", "prompts": [its], "n": 2, "groups": 1}
    assert world.post("/v1/batches", VICTIM, batch).status_code == 202
    report = {"run": "its-run", "step": 1, "metrics": {MARK: 1.0}}
    assert world.post("/v1/reports", VICTIM, report).status_code == 200
    for scopes in HELD:
        names = [] if scopes == "nothing" else scopes.split(",")
        world.texts[scopes] = world.keys.create(ME, names)[1]
    return world


def routes(app: Flask) -> dict[str, str]:
    """Method and rule of everything that is served → its endpoint."""
    return {
        f"{method} {rule.rule}": rule.endpoint
        for rule in app.url_map.iter_rules()
        for method in rule.methods - {"HEAD", "OPTIONS"}
    }


def call(world: World, route: str, who: str | None, policy: str = "b", query: str = ""):
    method, rule = route.split(" ", 1)
    places = {**PLACES, "name": "app.js" if rule.startswith("/page/") else policy}
    path = re.sub(r"<(?:\w+:)?(\w+)>", lambda place: places[place[1]], rule)
    query = "&".join(filter(None, (ENDLESS.get(route), query)))
    if method == "PUT":
        more = {"data": b"x", "content_type": "application/gzip"}
    else:
        more = {"json": None if method == "GET" else BODIES.get(route, {})}
    return world.call(method, path, who, query_string=query, **more)


def all_of(world: World, part: str = "") -> dict[str, bytes]:
    """Everything in Redis whose key or value has that text."""
    keys = sorted(world.redis.scan_iter(count=1000))
    with world.redis.pipeline() as pipe:
        for key in keys:
            pipe.execute_command("DUMP", key, NEVER_DECODE=[])
        return {
            key: dump for key, dump in zip(keys, pipe.execute(), strict=True) if part.encode() in key.encode()
        }


def test_each_route_says_what_it_needs(world):
    """One that somebody adds fails here until it has been thought about, and is closed until then."""
    served = routes(world.app)
    assert served.keys() == ROUTES.keys()
    for route, endpoint in served.items():
        needed = scope_of(world.app.view_functions[endpoint], route.split()[0])
        assert (needed and " ".join(needed)) == ROUTES[route], route


@pytest.mark.parametrize("policy", ["a", "b"])
def test_who_has_not_the_scope_is_refused_and_changes_nothing_and_who_has_it_is_let_in(world, policy):
    changed = set()
    for route, needed in ROUTES.items():
        for engine in ENGINES:
            world.gate.backends.put(engine)
        before = all_of(world)
        if needed is None:
            assert call(world, route, None).status_code not in (401, 403) or route == "POST /v1/session"
            continue
        assert call(world, route, None, policy).status_code == 401, route
        scopes = needed.format(name=policy if "<name>" in route else "default").split()
        for who, held in HELD.items():
            if held.isdisjoint(scopes):
                refused = call(world, route, who, policy)
                assert refused.status_code == 403 and refused.json["title"] == "Scope missing", (route, who)
                assert f"needs the scope '{scopes[0]}'" in refused.json["detail"]
                assert f'scope="{scopes[0]}"' in refused.headers["WWW-Authenticate"]
        assert all_of(world) == before, route
        for who, held in HELD.items():
            if not held.isdisjoint(scopes):
                assert call(world, route, who, policy).status_code not in (401, 403), (route, who)
        if all_of(world) != before:
            changed.add(route)
    # The calls that were refused are such as do something.
    assert changed >= {
        "POST /v1/policy",
        "POST /v1/policies/<name>",
        "DELETE /v1/backends/<backend_id>",
        "POST /v1/backends/<backend_id>/drain",
        "POST /v1/rollouts",
        "POST /v1/batches",
        "POST /v1/reports",
    }


def test_all_scopes_but_admin_show_and_change_nothing_of_another_tenant(world):
    every = [*(scope for scope in Scope if scope is not Scope.ADMIN), "train:a", "train:b", DEFAULT]
    me = world.keys.create(ME, every)[1]
    for engine in ENGINES:
        world.gate.backends.put(engine)
    its = {part: all_of(world, part) for part in ("its-rollout", "its-batch", VICTIM)}
    assert all(its.values())
    for route in ROUTES:
        answer = call(world, route, me)
        assert MARK not in answer.text, route
        named = call(world, route, me, query=f"tenant={VICTIM}")
        assert named.status_code >= 400 or ROUTES[route] is None or "/v1/" not in route, route
        assert MARK not in named.text
    assert {part: all_of(world, part) for part in its} == its
    assert MARK in call(world, "GET /v1/rollouts/<rollout_id>", VICTIM).text
    assert MARK in call(world, "GET /v1/rollouts", "admin", query=f"tenant={VICTIM}").text


def test_the_name_in_an_address_opens_the_policy_of_that_very_name_and_no_other(server, monkeypatch):
    monkeypatch.setattr(auth, "CACHE_S", 0.0)
    world = World(server.url)
    reached = []

    def probe(name: str):
        reached.append(name)
        return {}

    world.app.add_url_rule("/v1/probes/<name>", "probe", operation(scope=TRAIN)(probe), methods=["POST"])

    def nameless():
        reached.append("nameless")

    world.app.add_url_rule("/v1/nameless", "nameless", operation(scope=TRAIN)(nameless), methods=["POST"])
    texts = {name: world.keys.create(ME, [f"train:{name}"])[1] for name in ("a", "default", "a.b", "train")}
    operator = world.keys.create(ME, ["operate"])[1]

    @settings(max_examples=200, deadline=None, derandomize=True)
    @given(
        name=st.text(st.characters(exclude_categories=["Cs"]), max_size=12).map(lambda text: quote(text, ""))
        | st.text(alphabet="aAbB./%2fF5c?#;{}name-_ *\\", max_size=8),
        who=st.sampled_from([*texts]),
    )
    @example("a/", "a")
    @example("A", "a")
    @example("a%2f..", "a")
    @example("a%2f..%2fb", "a")
    @example("./a", "a")
    @example("b/../a", "a")
    @example("a?", "a")
    @example("a%0a", "a")
    @example("a%00", "a")
    @example("{name}", "a")
    @example("*", "a")
    @example("default/", "default")
    @example("axb", "a.b")
    @example("%ef%bd%81", "a")
    @example("train:a", "train")
    @example("a%22,scope=%22admin", "a")
    def attempt(name, who):
        reached.clear()
        answer = world.call("POST", f"/v1/probes/{name}", texts[who])
        assert answer.status_code < 500 and (answer.status_code == 200) == bool(reached)
        assert set(reached) <= {who}
        assert answer.headers.get("WWW-Authenticate", "").count("scope=") <= 1

    attempt()
    for who, text in texts.items():
        reached.clear()
        assert world.call("POST", f"/v1/probes/{who}", text).status_code == 200 and reached == [who]
    assert world.call("POST", "/v1/probes/anything", operator).status_code == 200
    reached.clear()
    # A route that asks for a name which its address has not is shut, to admins as well.
    for text in (texts["a"], operator, world.keys.create(ME, ["admin"])[1]):
        assert world.call("POST", "/v1/nameless", text).status_code == 500 and not reached


def test_a_trainer_s_key_brings_weights_to_its_policy_and_follows_them_and_does_nothing_else(world):
    world.gate.backends.put(ENGINES[1])
    key = world.keys.create(ME, [DEFAULT])[1]
    made = world.post("/v1/policy", key, {"version": "2"})
    assert made.status_code == 202 and list(made.json["backends"]) == ["other"]
    assert world.get(f"/v1/policy/updates/{made.json['id']}", key).json["id"] == made.json["id"]
    assert world.get("/v1/policy", key).json["update"]["id"] == made.json["id"]
    assert world.call("DELETE", "/v1/policy", key).status_code == 409  # it is under way
    for path in ("/v1/rollouts", "/v1/results", "/v1/backends", "/v1/fleet", "/v1/status", "/metrics"):
        assert world.get(path, key).status_code == 403


def test_an_update_is_known_by_its_own_policy_s_name_alone(world):
    world.gate.backends.put(ENGINES[0])
    lora = {"version": "2", "path": "/weights", "lora": {}}
    made = world.post("/v1/policies/b", "train:a", lora)
    assert made.status_code == 403
    of_b = world.keys.create(ME, ["train:b"])[1]
    made = world.post("/v1/policies/b", of_b, lora).json["id"]
    assert world.get(f"/v1/policies/b/updates/{made}", of_b).json["policy"] == "b"
    for path, who in ((f"/v1/policies/a/updates/{made}", "train:a"), (f"/v1/policy/updates/{made}", DEFAULT)):
        for key in (who, "operate", "admin"):
            answer = world.get(path, key)
            assert answer.status_code == 404 and answer.json["title"] == "No such update", (path, key)
    assert world.get("/v1/policies/a", "train:a").json["update"] is None


@pytest.mark.parametrize(
    "name", ["A", "a b", "-a", "a%0a", "a*", "a'", "{name}", "%ef%bd%81", "a" * 64, "nobody"]
)
def test_a_view_refuses_what_is_no_policy_s_name_and_a_name_that_nobody_has(world, name):
    world.gate.backends.put(ENGINES[0])
    before = all_of(world)
    for method, rest in (("GET", ""), ("POST", ""), ("DELETE", ""), ("GET", "/updates/none")):
        body = None if method == "GET" else {"version": "2"}
        refused = world.call(method, f"/v1/policies/{name}{rest}", "admin", json=body)
        assert refused.status_code == 404 and refused.json["title"] == "No such policy", refused.text
    assert all_of(world) == before


def test_a_trainer_names_no_adapter_of_another_policy(world):
    policies = {"default": "adapter", "b": "adapter-of-b"}
    world.gate.backends.put(ENGINES[0].model_copy(update={"policies": policies}))
    key = world.keys.create(ME, [DEFAULT])[1]
    lora = {"version": "2", "path": "/weights", "lora": {"name": "adapter-of-b"}}
    before = all_of(world)
    refused = world.post("/v1/policy", key, lora)
    assert refused.status_code == 400 and refused.json["errors"][0]["field"] == "lora.name"
    assert "serves policy 'default' as model 'adapter', and 'adapter-of-b' is another" in refused.text
    assert all_of(world) == before
    assert world.post("/v1/policy", key, {**lora, "lora": {"name": "adapter"}}).status_code == 202


def test_a_tenant_s_requests_name_only_policies_that_it_may_name(world):
    world.tenants.set(Tenant(name=ME, policies=("team-*",)))
    key = world.keys.create(ME, ["submit", "read"])[1]

    def refused(path="/v1/rollouts", **body):
        answer = world.post(path, key, body)
        assert answer.status_code == 403, answer.text
        assert "may not use" in answer.text and "allowed policies: team-*" in answer.text
        return [error["field"] for error in answer.json["errors"]]

    named = {"handler": "noop", "policy": "team-a"}
    before = all_of(world)
    assert refused(handler="noop") == ["policy"]  # `default`
    assert refused(handler="noop", policy="b") == ["policy"]
    assert refused(requests=[named, {**named, "policy": "team"}]) == ["requests.1.policy"]
    assert refused("/v1/batches", prompts=[named, {"handler": "noop"}], n=2, groups=1) == ["prompts.1.policy"]
    assert all_of(world) == before
    # What it may name has to be there, too.
    assert world.post("/v1/rollouts", key, named).status_code == 400
    world.gate.backends.put(ENGINES[0].model_copy(update={"policies": {"team-a": "m"}}))
    assert world.post("/v1/rollouts", key, named).status_code == 202
    batch = world.post("/v1/batches", key, {"prompts": [named], "n": 2, "groups": 1, "closed": False})
    assert batch.status_code == 202
    assert refused(f"/v1/batches/{batch.json['id']}/prompts", prompts=[{"handler": "noop"}])
    assert world.get("/v1/status", key).json["tenant"]["policies"] == ["team-*"]
    world.tenants.set(world.tenants.get(ME).model_copy(update={"policies": ()}))
    assert world.post("/v1/rollouts", key, named).status_code == 403
    world.tenants.set(Tenant(name=ME))
    assert world.submit(key).status_code == 202


def test_the_compatible_interfaces_name_the_policy_default_and_need_it_too(world):
    world.tenants.set(Tenant(name=ME, policies=("team-*",)))
    key = world.keys.create(ME, ["submit", "read"])[1]
    assert world.post("/start", key).status_code == 200
    body = {"instance": {"data_source": "noop"}, "sampling_params": {}}
    answer = world.post("/process", key, body)
    assert answer.status_code == 403 and "allowed policies: team-*" in answer.text, answer.text


class OldScope(StrEnum):
    SUBMIT = "submit"
    READ = "read"
    METRICS = "metrics"
    ADMIN = "admin"


class OldKey(BaseModel):
    """A key as releases up to 0.9 read and write it."""

    model_config = ConfigDict(frozen=True)

    id: str
    tenant: str
    scopes: frozenset[OldScope]
    digest: str
    created_at: float
    lifetime_s: float | None = None
    expires_at: float | None = None
    revoked_at: float | None = None
    replaced_by: str | None = None


class OldTenant(BaseModel):
    """The same of a tenant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    quota_live: int | None = None
    per_minute: int | None = None
    quota_bytes: int | None = None
    handlers: tuple[str, ...] | None = None
    images: tuple[str, ...] | None = None
    runtimes: tuple[str, ...] | None = None
    mounts: tuple[str, ...] | None = None
    weight: float = 1.0


def test_a_gateway_of_the_release_before_reads_keys_and_tenants_and_grants_no_more(world):
    world.tenants.set(Tenant(name=ME, policies=("team-*",), handlers=("noop",)))
    stored = world.redis.hgetall(names.API_KEYS)
    for known in world.keys.list():
        old = OldKey.model_validate_json(stored[known.id])
        assert old.scopes == known.scopes & {*OldScope}
        assert (old.tenant, old.digest, old.expires_at) == (known.tenant, known.digest, known.expires_at)
    assert {known.scopes for known in world.keys.list()} >= {frozenset({"operate"}), frozenset({"train:a"})}
    for name, raw in world.redis.hgetall(names.TENANTS).items():
        assert OldTenant.model_validate_json(raw).name == name
    assert world.tenants.get(ME) == Tenant(name=ME, policies=("team-*",), handlers=("noop",))


def test_what_the_release_before_wrote_is_read_and_what_it_changes_keeps_its_limits(world):
    world.tenants.set(Tenant(name=ME, policies=("team-*",)))
    before = OldKey(id="0" * 12, tenant="old", scopes=frozenset(OldScope), digest="0" * 64, created_at=1.0)
    world.redis.hset(names.API_KEYS, before.id, before.model_dump_json())
    world.redis.hset(names.TENANTS, ME, OldTenant(name=ME, quota_live=3).model_dump_json())
    world.redis.hset(names.TENANTS, "old", OldTenant(name="old").model_dump_json())
    read = world.keys.access()
    assert read.keys[before.id].scopes == {*OldScope} and read.keys[before.id].may("train:b", "operate")
    assert read.tenant(ME) == Tenant(name=ME, quota_live=3, policies=("team-*",)) == world.tenants.get(ME)
    assert read.tenant("old") == Tenant(name="old") == world.tenants.get("old")
    # One of a release to come, with a scope that nobody here knows.
    later = {**json.loads(before.model_dump_json()), "id": "1" * 12, "scopes": [], "further": ["rule"]}
    world.redis.hset(names.API_KEYS, later["id"], json.dumps(later))
    assert not world.keys.access().keys[later["id"]].may("read", "operate", "train:a")
