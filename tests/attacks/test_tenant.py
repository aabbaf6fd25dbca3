"""What one tenant tries against another: its rollouts, its batches, its jobs, its share of the service."""

from __future__ import annotations

import time

import pytest

from rollout.batch import BatchRequest
from rollout.schema import Backend, RolloutRequest, State, new_id
from rollout.webhooks import WebhookError, signed_headers, tenant_secret, verify_webhook
from services import dispatch
from services.gateway import auth
from services.gateway.compat import calls
from services.settings import Settings
from services.state.api_keys import ApiKey
from services.state.batches import store as batches
from services.state.batches.store import BatchStore
from services.state.jobs import JobStore
from services.state.results import stream as results
from services.state.tenants import Tenant
from services.state.webhooks import Delivery
from tests.attacks import attack
from tests.attacks.conftest import CONTROL
from tests.helpers.attacked import ATTACKER, VICTIM, service
from tests.helpers.chores import services
from tests.helpers.results import ended
from workers.chores import webhooks
from workers.chores.batches import Batcher

MB = 1 << 20


@pytest.fixture(params=["service", CONTROL])
def target(request, server, monkeypatch):
    monkeypatch.setattr(auth, "CACHE_S", 0.0)
    return service(server.url, request.param == CONTROL, monkeypatch)


def batcher(target) -> Batcher:
    """What moves batches on in a worker."""
    return Batcher(services(target.gate.redis, target.gate.settings))


def settle(worker: Batcher) -> None:
    for _ in range(20):
        if not worker.step():
            return


def any_tenants(self, ids, tenant=None):
    return dispatch_cancel_many(self, ids)


dispatch_cancel_many = dispatch.Dispatcher.cancel_many
get_batch = BatchStore.get


@attack(stopped_by="a batch cancels its own tenant's rollouts only; ids of its groups cannot be guessed")
def test_cancel_a_strangers_rollout_by_a_batch_whose_ids_fit(target):
    target.without(batches, "_salt", lambda _: "")
    target.without(dispatch.Dispatcher, "cancel_many", any_tenants)
    target.submit(VICTIM, id="train.1")
    batch = BatchRequest(id="train", n=1, groups=1, prompts=[RolloutRequest(handler="noop")])
    body = batch.model_dump(mode="json", exclude_none=True)
    for prompt in body["prompts"]:
        del prompt["n"]
    assert target.world.post("/v1/batches", ATTACKER, body).status_code == 202
    worker = batcher(target)
    settle(worker)
    assert target.world.post("/v1/batches/train/cancel", ATTACKER).status_code == 200
    settle(worker)
    return target.gate.rollouts.state("train.1") is State.CANCELLED


@attack(stopped_by="ids of a batch's groups cannot be guessed")
def test_take_the_ids_that_a_strangers_batch_will_need(target):
    target.without(batches, "_salt", lambda _: "")
    for k in (1, 2):
        target.submit(ATTACKER, id=f"train.{k}", n=2)
    body = {"id": "train", "n": 2, "groups": 1, "prompts": [{"handler": "noop"}]}
    assert target.world.post("/v1/batches", VICTIM, body).status_code == 202
    settle(batcher(target))
    return target.gate.tenants.live(VICTIM) == 0


@attack(stopped_by="a cursor is a place, and what is read from it is the caller's own")
def test_read_what_a_stranger_completed_with_its_cursor(target):
    target.without(results, "matches", lambda *_, **__: True)
    target.submit(VICTIM, metadata={"secret": "of the victim"})
    target.end(VICTIM)
    cursor = target.world.get("/v1/results?cursor=0&limit=1", VICTIM).json["cursor"]
    before = f"{int(cursor.split('-')[0]) - 1}"
    texts = [target.world.get(f"/v1/results?cursor={at}", ATTACKER).text for at in ("0", before)]
    stream = target.world.get(f"/v1/results/stream?cursor={before}", ATTACKER)
    pieces = iter(stream.response)
    if target.control:
        texts += [next(pieces).decode() for _ in range(2)]
    stream.close()
    return any("of the victim" in text for text in texts)


@attack(stopped_by="jobs are kept by tenant")
def test_cancel_a_strangers_job_by_its_job_id(target):
    target.without(calls, "key_of", lambda api, *parts: JobStore.key(VICTIM, api, *parts))
    target.without(dispatch.Dispatcher, "cancel_many", any_tenants)
    (rollout_id,) = target.submit(VICTIM)
    target.gate.jobs.claim(JobStore.key(VICTIM, "prorl", "0", "1"), rollout_id, "body", 60.0)
    target.world.post("/cancel", ATTACKER, {"job_id": "1"})
    return target.gate.rollouts.state(rollout_id) is State.CANCELLED


@attack(stopped_by="404 for what is another tenant's")
def test_read_and_stop_a_strangers_batch(target):
    target.without(BatchStore, "get", lambda self, batch_id, tenant=None: get_batch(self, batch_id))
    batch_id = new_id()
    body = {"id": batch_id, "n": 1, "groups": 1, "prompts": [{"handler": "noop"}]}
    assert target.world.post("/v1/batches", VICTIM, body).status_code == 202
    readable = target.world.get(f"/v1/batches/{batch_id}", ATTACKER).status_code == 200
    target.world.post(f"/v1/batches/{batch_id}/cancel", ATTACKER)
    return readable or target.world.get(f"/v1/batches/{batch_id}", VICTIM).json["state"] == "cancelled"


@attack(stopped_by="a batch takes over its own tenant's only")
def test_carry_a_strangers_prompts_into_a_batch_of_ones_own(target):
    target.without(BatchStore, "get", lambda self, batch_id, tenant=None: get_batch(self, batch_id))
    batch_id = new_id()
    body = {"id": batch_id, "n": 1, "groups": 1, "prompts": [{"handler": "noop", "task": {"secret": 1}}]}
    assert target.world.post("/v1/batches", VICTIM, body).status_code == 202
    # As if done, with a prompt left to be carried over.
    target.world.redis.hset(f"batch:{{{batch_id}}}", "state", "done")
    mine = {"n": 1, "groups": 1, "prompts": [], "carry_from": batch_id}
    answer = target.world.post("/v1/batches", ATTACKER, mine)
    return answer.status_code == 202 and answer.json["waiting_prompts"] == 1


@attack(stopped_by="a request is kept once for its group")
def test_fill_redis_by_one_call_with_many_members(target):
    if target.control:
        expand = dispatch._expand

        def one_each(*args):
            return [
                vars(new)["digest"] and type(new)(**{**vars(new), "digest": f"{new.digest}{new.index}"})
                for new in expand(*args)
            ]

        target.without(dispatch, "_expand", one_each)
    before = target.world.redis.info("memory")["used_memory"]
    target.submit(ATTACKER, n=200, task={"text": "x" * (MB // 4)})
    return target.world.redis.info("memory")["used_memory"] - before > 10 * MB


@attack(stopped_by="bytes times n are bounded")
def test_have_a_reader_get_a_large_request_a_thousand_times(target):
    if target.control:
        target.restart(max_group_bytes=1 << 40)
    answer = target.world.submit(ATTACKER, n=1000, task={"text": "x" * MB})
    assert answer.status_code in (202, 400)
    return answer.status_code == 202


@pytest.mark.parametrize(
    "by", ["requests that are cancelled at once", "prompts of a batch that never starts"]
)
@attack(stopped_by="a quota of bytes a tenant, of ended rollouts and of prompts that wait too")
def test_fill_redis(target, by):
    if not target.control:
        target.world.tenants.set(Tenant(name=ATTACKER, quota_bytes=MB))
    before = target.world.redis.info("memory")["used_memory"]
    batch = {"id": "open", "n": 1, "groups": 1, "closed": False}
    assert target.world.post("/v1/batches", ATTACKER, batch).status_code == 202
    task = {"text": "x" * (MB // 3)}
    for k in range(12):
        if by.startswith("requests"):
            target.world.submit(ATTACKER, id=f"fill-{k}", task=task)
            target.end(ATTACKER)
        else:
            prompts = {"prompts": [{"handler": "noop", "task": task}]}
            target.world.post("/v1/batches/open/prompts", ATTACKER, prompts)
    return target.world.redis.info("memory")["used_memory"] - before > 2 * MB


@pytest.mark.parametrize("setting", ["sse_streams", "gateway_waiters"])
@attack(stopped_by="a share of the streams and of the waiting places a tenant")
def test_take_every_place_to_wait_in(target, setting):
    """The attacker opens streams until there is no room for it; then the victim asks."""
    target.restart(gateway_tenant_share=1.0 if target.control else 0.75, **{setting: 8})
    streams = [target.world.get("/v1/results/stream?cursor=$", ATTACKER) for _ in range(10)]
    streams.append(target.world.get("/v1/results/stream?cursor=$", VICTIM))
    waits = target.world.get("/v1/results?cursor=$&wait=0.05", VICTIM)
    for answer in streams:
        answer.close()
    return (streams[-1] if setting == "sse_streams" else waits).status_code == 503


@attack(stopped_by="each tenant's webhooks are signed with a secret of its own")
def test_speak_for_the_service_with_ones_own_webhook_secret(target):
    target.without(webhooks, "tenant_secret", lambda secret, _: secret)
    base = "the service's secret"
    config = Settings(redis_url=target.world.url, webhook_secret=base)
    sender = webhooks.Deliverer(services(target.world.redis, config))
    delivery = Delivery("r", "https://example.com/", "summary", 0.0)
    (secret,) = sender._secrets_for(delivery, ATTACKER)
    (victims,) = sender._secrets_for(delivery, VICTIM)
    assert victims == (base if target.control else tenant_secret(base, VICTIM))
    forged = webhooks.message(ended(tenant=VICTIM))
    headers = signed_headers([secret], "r", int(time.time()), forged)
    try:
        return verify_webhook(forged, headers, victims).reward == 1.0
    except WebhookError:
        return False


# -- with a key for something else ----------------------------------------------------------------


def any_scope(self, *scopes):
    return True


@attack(stopped_by="the scope has the name of one policy")
def test_bring_weights_to_the_policy_of_another_team(target):
    target.without(ApiKey, "may", any_scope)
    serves = {"model": "m", "tokenizer": "t", "max_model_len": 100}
    target.gate.backends.put(Backend(id="engine", url="http://127.0.0.1:9", **serves))
    _, key = target.world.keys.create(ATTACKER, ["submit", "read", "train:mine"])
    target.world.post("/v1/policy", key, {"version": "evil"})
    return target.gate.policy.status().update is not None


@attack(stopped_by="a trainer's key moves no backends")
def test_register_a_server_of_one_s_own_or_take_one_away_with_a_trainer_s_key(target):
    target.without(ApiKey, "may", any_scope)
    serves = {"model": "m", "tokenizer": "t", "max_model_len": 100}
    target.gate.backends.put(Backend(id="engine", url="http://127.0.0.1:9", **serves))
    _, key = target.world.keys.create(ATTACKER, ["submit", "read", "train:default"])
    target.world.post("/v1/backends/engine/drain", key)
    target.world.call("DELETE", "/v1/backends/engine", key)
    left = target.gate.backends.get("engine")
    return left is None or left.draining


@attack(stopped_by="`operate` is for what all share, and names no tenant")
def test_read_or_cancel_rollouts_with_an_operator_s_key(target):
    target.without(ApiKey, "may", any_scope)
    (victims,) = target.submit(VICTIM)
    _, key = target.world.keys.create(ATTACKER, ["operate"])
    read = target.world.get(f"/v1/rollouts/{victims}?tenant={VICTIM}", key)
    target.world.post(f"/v1/rollouts/{victims}/cancel?tenant={VICTIM}", key)
    return read.status_code == 200 or target.gate.rollouts.state(victims) is State.CANCELLED


@attack(stopped_by="a tenant's policies are looked at in each request")
def test_call_a_policy_that_one_s_tenant_was_not_given(target):
    target.without(Tenant, "may_use", any_scope)
    target.world.tenants.set(Tenant(name=ATTACKER, policies=("mine-*",)))
    answers = [target.world.submit(ATTACKER, policy=name) for name in ("theirs", "mine", "default")]
    return any(answer.status_code == 202 for answer in answers)
