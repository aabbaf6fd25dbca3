"""What can be sent to the gateway: values that readers choke on, and bodies that cost more than they are."""

from __future__ import annotations

import gzip
import json
import re
import tracemalloc
from dataclasses import replace
from itertools import islice

import pytest
import redis
from pydantic import ConfigDict, Field
from pydantic_core import from_json

from rollout.schema import HandlerInfo, Limits, RolloutRequest, Stage
from services import dispatch
from services.gateway import auth, bodies, metrics, problems, requests, tasks
from services.gateway.compat import nemo_gym, nemo_gym_answers
from services.gateway.routes import rollouts as rollout_routes
from services.settings import Settings
from services.state import keys, scripts
from services.state.fleet import FleetStore
from services.state.rollouts.reading import Skipped
from services.state.rollouts.store import Claim, RolloutStore
from services.state.webhooks import WebhookStore
from services.webhook_address import AllowedAddresses
from tests.attacks import attack
from tests.attacks.conftest import CONTROL
from tests.helpers.attacked import ATTACKER, OPERATOR, VICTIM, service
from tests.helpers.chores import services
from workers.chores.archive import Archiver

MB = 1 << 20
NUMBERS = HandlerInfo(
    name="numbers",
    task_schema={"properties": {"all": {"type": "array", "items": {"type": "string"}}}},
)


@pytest.fixture(params=["service", CONTROL])
def target(request, server, monkeypatch):
    monkeypatch.setattr(auth, "CACHE_S", 0.0)
    gate = service(server.url, request.param == CONTROL, monkeypatch)
    FleetStore(gate.world.redis).put_handlers([NUMBERS])
    return gate


def refused(answer) -> bool:
    """A 4xx that names a field."""
    return 400 <= answer.status_code < 500 and bool(answer.json["errors"]) and len(answer.data) < 10_000


def peak_mb(attempt) -> float:
    tracemalloc.start()
    try:
        attempt()
        return tracemalloc.get_traced_memory()[1] / MB
    finally:
        tracemalloc.stop()


def damaged(target, who: str) -> str:
    """An ended rollout whose request nobody can read."""
    (rollout_id,) = target.submit(who)
    target.end(who)
    spoil(target, rollout_id, '{"handler": "x", "limits": {"run_timeout_s": null}}')
    return rollout_id


def spoil(target, rollout_id: str, request: str = "{") -> None:
    """Give a rollout this request, and no other that was submitted with the same."""
    client, record = target.world.redis, keys.record(rollout_id)
    client.hset(record, "digest", f"spoilt-{rollout_id}")
    client.hset(keys.request(client.hget(record, "tenant"), f"spoilt-{rollout_id}"), "body", request)


def raises(self, rollout_id, cause):
    raise cause


# -- values -----------------------------------------------------------------------------------


def tasks_with(*values: bytes) -> list[bytes]:
    return [b'{"handler": "noop", "task": {"x": %s}}' % value for value in values]


TEXT = '{"handler": "noop", "task": {"x": "é"}}'
SPELLINGS = {
    "no numbers": [
        b'{"handler": "noop", "%s": {"x": %s}}' % (where, value)
        for value in (b"1e999", b"-1e999", b"NaN", b"Infinity", b"-Infinity")
        for where in (b"metadata", b"task")
    ],
    "two readings": [b'{"handler": "noop", "handler": "boxed", "task": {"image": "a", "image": "b"}}'],
    "no characters": [*tasks_with(rb'"\ud800"'), rb'{"handler": "noop", "task": {"\uDFFF": 1}}'],
    "other encodings": [
        TEXT.encode(name) for name in ("utf-16", "utf-16-le", "utf-32", "utf-8-sig", "latin-1")
    ],
}


@pytest.mark.parametrize("kind", SPELLINGS)
@attack(stopped_by="one strict reader; what is stored is read first")
def test_store_what_another_reader_takes_for_something_else(target, kind):
    strict = kind in ("no numbers", "two readings")
    target.without(bodies, "read_json", from_json if strict else json.loads)
    if kind == "no numbers":
        target.without(dispatch, "stored_form", lambda request: request.model_dump_json())
    answers = [target.raw(ATTACKER, "/v1/rollouts", body) for body in SPELLINGS[kind]]
    if target.control and kind == "no characters":
        return any("surrogate" in answer.text for answer in answers)  # only what is written says so
    return not all(map(refused, answers))


class LooseLimits(Limits):
    """As they were: without upper bounds."""

    model_config = ConfigDict(allow_inf_nan=True)
    init_timeout_s: float = 300.0
    run_timeout_s: float = 1800.0
    tool_timeout_s: float = 60.0


class LooseRequest(RolloutRequest):
    limits: LooseLimits = Field(default_factory=LooseLimits)


@attack(stopped_by="limits have bounds; what is stored is read first")
def test_make_a_record_that_nobody_can_read(target):
    target.without(bodies, "read_json", from_json)
    submit = rollout_routes.submit
    target.without(submit, "operation", replace(submit.operation, body=(LooseRequest,)))
    target.without(dispatch, "stored_form", lambda request: request.model_dump_json())
    names = [b"run_timeout_s", b"init_timeout_s", b"tool_timeout_s"]
    body = b'{"handler": "noop", "id": "%s", "limits": {"%s": 1e999}}'
    answers = [target.raw(ATTACKER, "/v1/rollouts", body % (name, name)) for name in names]
    there = [target.gate.rollouts.state(name.decode()) for name in names]
    read = [target.gate.rollouts.get(name.decode()) for name in names]
    assert target.control or all(map(refused, answers))
    return any(there) and not all(read)


@attack(stopped_by="numbers of at most 400 characters that a float can hold")
def test_send_a_number_of_five_million_digits(target):
    target.without(bodies, "read_json", json.loads)
    target.without(bodies.json, "JSONDecoder", json.JSONDecoder)
    digits = [b"1" * 401, b"9" * 5_000_000, b"1" + b"0" * 399, b"0." + b"1" * 5_000_000, b"1e" + b"9" * 4000]
    return not all(refused(target.raw(ATTACKER, "/v1/rollouts", body)) for body in tasks_with(*digits))


@attack(stopped_by="64 levels at most")
def test_store_what_nests_deeper_than_readers_go(target):
    target.without(bodies, "MAX_DEPTH", 10**6)
    sent = [b"[" * depth + b"]" * depth for depth in (70, 180, 900, 100_000)]
    return not all(refused(target.raw(ATTACKER, "/v1/rollouts", body)) for body in tasks_with(*sent))


# -- one bad record ----------------------------------------------------------------------------


@attack(stopped_by="readers pass a bad record over, and tell of it")
def test_hide_everybodys_completions_behind_a_bad_record(target):
    target.without(Skipped, "tell", raises)
    (mine,) = target.submit(VICTIM)
    target.end(VICTIM)
    bad = damaged(target, ATTACKER)
    pages = [
        target.world.get(path, OPERATOR)
        for path in ("/v1/results?tenant=*", "/v1/rollouts?tenant=*", "/v1/results?tenant=attacker")
    ]
    if any(page.status_code != 200 for page in pages):
        return True
    assert bad in pages[0].json["expired"]
    text = target.world.call("GET", "/metrics", OPERATOR).text
    assert re.search(r"^rollout_records_unreadable_total 1\.0$", text, re.MULTILINE)
    return any(mine not in page.text for page in pages[:2])


@attack(stopped_by="a claim that cannot be read ends its rollout as failed")
def test_stop_init_for_all_by_a_bad_record(target):
    target.without(RolloutStore, "_end_unreadable", lambda self, *args: (_ for _ in ()).throw(args[-1]))
    (bad,) = target.submit(ATTACKER, priority=9)
    spoil(target, bad)
    (mine,) = target.submit(VICTIM)
    claimed = []
    try:
        for _ in range(2):
            claim = target.gate.rollouts.claim_next("w", node="n")
            claimed += [claim.rollout_id] if isinstance(claim, Claim) else []
    except ValueError:
        return True
    record = target.world.redis.hgetall(keys.record(bad))
    assert record["state"] == "failed" and "cannot be read" in record["error"]
    return claimed != [mine]


@attack(stopped_by="the archive passes a bad record over")
def test_stop_the_archive_by_a_bad_record(target, tmp_path):
    target.without(Skipped, "tell", raises)
    damaged(target, ATTACKER)
    (mine,) = target.submit(VICTIM)
    target.end(VICTIM)
    config = Settings(redis_url=target.world.url, archive_dir=str(tmp_path))
    archiver = Archiver(services(target.world.redis, config))
    try:
        archiver._batch()
    except ValueError:
        return True
    files = b"".join(gzip.decompress(path.read_bytes()) for path in tmp_path.iterdir())
    return mine.encode() not in files


@attack(stopped_by="webhooks of others go on past a bad record")
def test_stop_webhooks_by_a_bad_record(target):
    target.without(Skipped, "tell", raises)
    bad = damaged(target, ATTACKER)
    spoil(target, bad)
    (mine,) = target.submit(VICTIM)
    target.end(VICTIM)
    store = WebhookStore(target.world.redis, "https://operator.example/hook")
    try:
        store.collect()
    except ValueError:
        return True
    return [delivery.rollout_id for delivery in store.due(10)] != [mine]


@attack(stopped_by="attempts are in the record; the reaper reads no request")
def test_stop_the_reaper_by_a_bad_record(target):
    ours = "tonumber(field(id, 'most_attempts'))"
    before = (
        "cjson.decode(redis.call('HGET', KEY.request(field(id, 'tenant'), field(id, 'digest')), 'body'))"
        ".limits.max_attempts"
    )
    assert ours in scripts.text("rollouts/record")
    text = scripts.text
    target.without(scripts, "text", lambda name: text(name).replace(ours, before))
    store = RolloutStore(target.world.redis, Settings(redis_url=target.world.url))
    (bad,) = target.submit(ATTACKER)
    (mine,) = target.submit(VICTIM)
    for due, rollout_id in enumerate((bad, mine), 1):
        store.claim(rollout_id, 1, Stage.INIT, "w")
        target.world.redis.hset(keys.record(rollout_id), "lease", 1)
        target.world.redis.zadd(keys.DUE, {rollout_id: due})
    spoil(target, bad)
    try:
        store.overdue()
    except redis.ResponseError:
        return True
    return store.state(mine) != "queued"


# -- cost --------------------------------------------------------------------------------------


@attack(stopped_by="lists fail at their first wrong item")
def test_take_memory_by_thousands_of_errors(target):
    if target.control:

        class Slow(nemo_gym.Open):
            verify_responses: list[dict]

        aggregate = nemo_gym.aggregate_metrics
        target.without(aggregate, "operation", replace(aggregate.operation, body=(Slow,)))
    body = b'{"verify_responses": [' + b"1," * 40_000 + b"1]}"
    return peak_mb(lambda: target.raw(ATTACKER, "/aggregate_metrics", body)) > 5


@attack(stopped_by="a task's errors are looked for one by one, and 20 are enough")
def test_take_memory_by_thousands_of_errors_of_a_task(target):
    for module in (tasks, problems):
        target.without(module, "islice", lambda errors, _: islice(errors, 10**9))
    body = b'{"handler": "numbers", "task": {"all": [' + b"1," * 10_000 + b"1]}}"
    return peak_mb(lambda: target.raw(ATTACKER, "/v1/rollouts", body)) > 5


@attack(stopped_by="a body has two million values at most")
def test_take_memory_by_a_million_empty_lists(target):
    assert bodies.MAX_VALUES <= 2_000_000
    target.patch.setattr(bodies, "MAX_VALUES", 40_000)  # the control takes ten seconds for a million
    target.without(bodies, "MAX_VALUES", 10**9)
    body = b'{"handler": "noop", "task": {"x": [' + b"[]," * 20_001 + b"1]}}"
    return not refused(target.raw(ATTACKER, "/v1/rollouts", body))


@attack(stopped_by="an error shows the beginning and the end of a value")
def test_have_five_megabytes_echoed(target):
    target.without(problems, "short", lambda text, _: text)
    target.without(tasks, "short", lambda text, _: text)
    long = "x" * (5 * MB)
    sent = [{"handler": "numbers", "task": {"all": long}}, {"handler": "noop", long: 1}]
    return max(len(target.world.post("/v1/rollouts", ATTACKER, body).data) for body in sent) > MB


@attack(stopped_by="series only of known methods and routes")
def test_grow_the_metrics_without_a_key(target):
    class Any:
        def __contains__(self, _):
            return True

    target.without(requests, "METHODS", Any())

    def series() -> int:
        return sum(len(family.samples) for family in metrics.REQUESTS.collect())

    before = series()
    for k in range(100):
        target.world.call(f"X{k}", f"/nowhere/{k}")
        target.world.call("GET", f"/nowhere/{k}")
        target.world.call("POST", f"/v1/rollouts/{k}/cancel")
    return series() - before > 50


@attack(stopped_by="sums stay within what JSON has")
def test_have_an_answer_that_is_no_json(target):
    target.without(nemo_gym_answers, "MAX_NUMBER", float("inf"))
    rows = [{"reward": 1.7e308, "_ng_task_index": 0, "metrics": {"m": 1.7e308}}] * 3
    answer = target.world.post("/aggregate_metrics", ATTACKER, {"verify_responses": rows})
    return answer.status_code >= 500 or "Infinity" in answer.text or "NaN" in answer.text


# -- addresses ----------------------------------------------------------------------------------


@attack(stopped_by="an address is written as four decimal numbers")
def test_send_webhooks_to_this_machine_under_another_spelling(target):
    target.restart(webhook_secret="s")
    target.without(AllowedAddresses, "check_url", lambda self, url: url)
    numbers = "127.1 127.0.1 2130706433 0x7f.1 0x7f000001 017700000001 0177.0.0.1 127.0.0.1. 0 0.0.0.0"
    others = "[::ffff:127.0.0.1] [::ffff:7f00:1] [::1] [64:ff9b::7f00:1] [::] 127.0.0.1 127.0.0.0x1"
    digits = "１２７.０.０.１ 127。0。0。1 ①②⑦.1 0x7f.0x0.0x0.0x1"
    hosts = f"{numbers} {others} {digits}".split()
    answers = {
        host: target.world.submit(ATTACKER, webhook={"url": f"http://{host}:6379/"}).status_code
        for host in hosts
    }
    assert set(answers.values()) <= {202, 400}
    return 202 in answers.values()
