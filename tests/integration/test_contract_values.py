"""Every model of the contract with odd values: through submit, store, read, list, complete and archive."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.batch import BatchRequest, GroupPage, PromptsRequest
from rollout.policy import PolicyRequest
from rollout.schema import (
    AckRequest,
    BackendRequest,
    DrainRequest,
    RedeliverRequest,
    ResultPage,
    Rollout,
    RolloutPage,
    RolloutRequest,
    Stage,
    State,
    SubmitRequest,
)
from rollout.trajectory import Trajectory
from services.gateway import auth
from services.gateway.compat.nemo_gym_answers import AggregateRequest
from services.gateway.routes.rollouts import CancelRequest
from services.settings import Settings
from services.state.api_keys import Scope
from services.state.rollouts.store import Claim, Finish
from tests.helpers.chores import services
from tests.helpers.long_forms import CHAOS
from workers.chores.archive import Archiver
from workers.chores.batches import Batcher

EXAMPLES = CHAOS("examples of a body", short=12, long=400)
STEP = CHAOS("step through the odd values of a field that two bodies have", short=2, long=1)
MODELS = {
    "/v1/rollouts": (RolloutRequest, SubmitRequest),
    "/v1/batches": (BatchRequest,),
    "/v1/batches/open/prompts": (PromptsRequest,),
    "/v1/rollouts/cancel": (CancelRequest,),
    "/v1/rollouts/ack": (AckRequest,),
    "/v1/webhooks/redeliver": (RedeliverRequest,),
    "/v1/policy": (PolicyRequest,),
    "/v1/backends/none/drain": (DrainRequest,),
    "/v1/backends": (BackendRequest,),
    "/aggregate_metrics": (AggregateRequest,),
}
ODD = (
    *("1e999", "-1e999", "NaN", "-Infinity", "9" * 400, "9" * 20_000, "0." + "3" * 20_000, "1e-999"),
    *(r'"\ud800"', r'{"\udc00": 1}', r'"\u0000"', '{"a": 1, "a": 2}', "[" * 63 + "]" * 63, "[" * 5000),
    *("[" + "1," * 30_000 + "1]", '"' + "x" * 100_000 + '"', "2147483648", "9007199254740993", str(2**63)),
    *('""', "null", "-1", "0", "true", "[]", "{}", '"é𝄞"', '" "', "1.7976931348623157e308", "5e-324"),
)
"""As they stand in a body."""
MARK = "the odd value goes here"
SECOND = (SubmitRequest, PromptsRequest)
"""Bodies with the requests that another one has, too."""


@pytest.fixture
def world(world, monkeypatch):
    # Thousands of calls by one key: to read it anew for each is a quarter of their time.
    monkeypatch.setattr(auth, "CACHE_S", 60.0)
    world.key("a", Scope.ADMIN)
    world.gate.guard.forget()
    # One for all: each that is made looks for the filters of everything that is installed.
    world.batcher = Batcher(services(world.gate.redis, world.gate.settings))
    return world


def paths(value, at=()):
    """Every place in a body."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in items:
        yield from paths(item, (*at, name))


def put(value, path, new):
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = put(copy[path[0]], path[1:], new)
    return copy


def full(model) -> dict:
    """A body with every field of a model, so that each can be the odd one."""
    request = {
        "handler": "noop",
        "task": {"x": {"y": [1]}},
        "n": 2,
        "metadata": {"m": 1},
        "tags": ["t"],
        "priority": 1,
        "sampling": {
            "temperature": 0.5,
            "top_p": 0.9,
            "top_k": 3,
            "max_tokens": 5,
            "seed": 1,
            "stop_token_ids": [1],
        },
        "limits": dict.fromkeys(RolloutRequest.model_fields["limits"].annotation.model_fields, 50)
        | {"max_attempts": 2},
        "policy_version": "v",
        "sandbox_runtime": "bubblewrap",
        "webhook": None,
        "id": None,
        "group_id": "g",
    }
    prompt = {name: value for name, value in request.items() if name not in ("id", "group_id", "n")}
    filters = [{"name": "uniform_reward", "options": {"o": 1}}]
    return {
        RolloutRequest: request,
        SubmitRequest: {"requests": [request, {"handler": "noop"}]},
        BatchRequest: {
            "id": None,
            "prompts": [prompt],
            "n": 2,
            "groups": 1,
            "filters": filters,
            "min_scored": 1,
            "oversample": 1.5,
            "max_in_flight": 4,
            "max_staleness": 1,
            "closed": True,
            "carry": "none",
            "carry_from": None,
            "max_carried": 1,
        },
        PromptsRequest: {"id": None, "prompts": [prompt], "closed": False},
        CancelRequest: {"ids": ["x"]},
        AckRequest: {"ids": ["x", "y"]},
        RedeliverRequest: {"ids": ["x"]},
        PolicyRequest: {
            "version": "v",
            "path": "/w",
            "mode": "keep",
            "canary": {"token_ids": [1, 2], "logprobs": [-0.5], "tolerance": 0.1},
            "lora": {"name": "l"},
            "backends": ["b"],
            "concurrency": 1,
            "reset_prefix_cache": False,
            "timeout_s": 10,
            "wait": 0,
        },
        DrainRequest: {"drain": True},
        BackendRequest: {
            "url": "http://127.0.0.1:9",
            "id": "b",
            "model": "m",
            "tokenizer": "t",
            "logprobs_mode": "raw_logprobs",
            "capacity_tokens": 5,
            "max_rollouts": 3,
            "drain": True,
        },
        AggregateRequest: {
            "verify_responses": [
                {"reward": 1.0, "_ng_task_index": 0, "metrics": {"m": 1.0}, "mask_sample": False}
            ]
        },
    }[model]


def readable(world, tmp_path) -> None:
    """Everything that reads rollouts takes all that is there, and the client's models take what it gives."""
    store = world.gate.rollouts
    ids = store.ids(tenant="a", limit=1000)
    for rollout_id in ids:
        claim = store.claim(rollout_id, 1, Stage.INIT, "w")
        if claim in ("overdue", "ended"):  # a deadline of 5e-324 s, say
            store.overdue()
            continue
        assert isinstance(claim, Claim), claim
        store.finish(claim, Finish(State.READY))
        store.finish(store.claim(rollout_id, 1, Stage.RUN, "w"), Finish(State.EVALUATING, {}, Trajectory()))
        store.finish(store.claim(rollout_id, 1, Stage.EVAL, "w"), Finish(State.COMPLETED, {"reward": "1.0"}))
        Rollout.model_validate_json(world.get(f"/v1/rollouts/{rollout_id}", "a").data)
    page = ResultPage.model_validate_json(world.get("/v1/results?cursor=0&limit=1000", "a").data)
    listed = RolloutPage.model_validate_json(world.get("/v1/rollouts?limit=1000", "a").data)
    assert (
        {rollout.id for rollout in page.rollouts} == {rollout.id for rollout in listed.rollouts} == set(ids)
    )
    assert page.expired == []
    config = Settings(redis_url=world.url, archive_dir=str(tmp_path))
    archiver = Archiver(services(world.redis, config))
    world.redis.delete("archive:cursor")
    before = set(tmp_path.iterdir())
    while archiver._batch():
        pass
    new = set(tmp_path.iterdir()) - before
    lines = b"".join(gzip.decompress(path.read_bytes()) for path in new).splitlines()
    assert {Rollout.model_validate_json(line).id for line in lines} == set(ids)


def refused_or_taken(answer) -> bool:
    """Whether a call was taken; one that was not is a problem that says why, in a few bytes."""
    assert answer.status_code < 500, answer.text[:500]
    if answer.status_code < 300:
        return True
    assert answer.content_type == "application/problem+json" and len(answer.data) < 30_000
    assert answer.json["detail"] and (answer.status_code != 400 or answer.json["errors"])
    return False


def prepared(world):
    """Nothing but the key, the handlers, and a batch that takes prompts."""
    kept = ("api_keys", "access", "handlers", "schema")
    world.redis.delete("-", *(key for key in world.redis.keys("*") if not key.startswith(kept)))
    world.post("/v1/batches", "a", {"id": "open", "n": 2, "groups": 5, "closed": False})


def settled(world) -> None:
    while world.batcher.step():
        pass


def odd_values(model, place):
    """All of them; a field of a request takes every other one, and the rest in the other body that has it."""
    if model is RolloutRequest or place[:1] in (("requests",), ("prompts",)):
        return ODD[(model in SECOND) % STEP :: STEP]
    return ODD


@pytest.mark.parametrize("path", MODELS)
def test_every_field_takes_every_odd_value_or_says_why_not(world, tmp_path, path):
    for model in MODELS[path]:
        body = full(model)
        for place in list(paths(body)):
            prepared(world)
            text = json.dumps(put(body, place, MARK))
            taken = []
            for odd in odd_values(model, place):
                data = text.replace(json.dumps(MARK), odd).encode()
                answer = world.call("POST", path, "a", data=data, content_type="application/json")
                taken.append(refused_or_taken(answer))
                assert not (taken[-1] and ("999" in odd and odd[0] in "-1")) or odd == "1e-999", odd
            if any(taken) and path.startswith(("/v1/rollouts", "/v1/batches")):
                settled(world)
                readable(world, tmp_path)
                settled(world)
                if "batches" in path:
                    for batch in world.get("/v1/batches", "a").json["batches"]:
                        page = world.get(f"/v1/batches/{batch['id']}/groups?verdict=all", "a").data
                        GroupPage.model_validate_json(page)


def anything():
    texts = st.text(st.characters(codec=None), max_size=300) | st.from_regex(
        r"[a-z0-9.:-]{1,140}", fullmatch=True
    )
    numbers = st.integers() | st.integers(-2, 2100) | st.floats(allow_nan=True, allow_infinity=True)
    leaves = st.none() | st.booleans() | numbers | texts
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=8) | st.dictionaries(texts, inner, max_size=8),
        max_leaves=30,
    )


@pytest.mark.parametrize("path", MODELS)
def test_whatever_stands_anywhere_is_taken_and_read_or_refused(world, tmp_path, path):
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def ask(data):
        prepared(world)
        body = full(data.draw(st.sampled_from(MODELS[path])))
        for _ in range(data.draw(st.integers(1, 4))):
            place = data.draw(st.sampled_from([at for at in paths(body) if at]))
            body = put(body, place, data.draw(anything()))
            if not isinstance(body, dict) or len(body) == 0:
                break
        if path == "/v1/backends" and str(body.get("url", "")).startswith("http"):
            body["url"] = "http://127.0.0.1:9"
        if isinstance(body.get("wait"), int | float):
            body["wait"] = 0
        sent = json.dumps(body).encode()
        answer = world.call("POST", path, "a", data=sent, content_type="application/json")
        if refused_or_taken(answer) and path.startswith(("/v1/rollouts", "/v1/batches")):
            settled(world)
            readable(world, tmp_path)

    ask()
