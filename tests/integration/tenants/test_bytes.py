"""Requests are kept once for their group, as long as its records, and counted among their tenant's bytes."""

from __future__ import annotations

import json

from rollout.batch import BatchRequest
from rollout.schema import RolloutRequest, Stage, State, new_id
from services.state import keys
from services.state.api_keys import Scope
from services.state.rollouts.store import Claim, Finish
from services.state.tenants import Tenant
from tests.helpers.chores import services
from workers.chores.batches import Batcher


def used(world, tenant: str) -> int:
    return int(world.redis.hget(keys.TENANTS_BYTES, tenant) or 0)


def settle(gate) -> None:
    worker = Batcher(services(gate.redis, gate.settings))
    while worker.step():
        pass


def end_all(gate, tenant: str) -> None:
    gate.rollouts.cancel_many(gate.rollouts.ids(tenant=tenant, limit=1000), tenant)


def test_a_group_has_one_request_until_its_last_record_expires(world):
    world.key("a", Scope.SUBMIT, Scope.READ)
    answer = world.submit("a", n=3, task={"a": 1}).json
    ids = [rollout["id"] for rollout in answer["rollouts"]]
    (kept,) = world.redis.keys("request:*")
    store = world.gate.rollouts
    assert world.redis.hget(kept, "live") == "3" and world.redis.ttl(kept) == -1
    assert {store.get(id_).request.task["a"] for id_ in ids} == {1}
    claim = store.claim(ids[0], 1, Stage.INIT, "w")
    assert isinstance(claim, Claim) and claim.request.task == {"a": 1}
    store.finish(claim, Finish("failed"))
    store.cancel(ids[1])
    assert world.redis.ttl(kept) == -1, "one is live"
    store.cancel(ids[2])
    assert world.redis.pttl(kept) >= world.redis.pttl(keys.record(ids[2])) > 0
    world.submit("a", n=3, task={"a": 1})  # the very same request again
    assert world.redis.ttl(kept) == -1 and world.redis.hget(kept, "live") == "3"
    assert world.redis.keys("request:*") == [kept]


def test_the_members_of_one_call_may_have_requests_of_their_own(world):
    world.key("a", Scope.SUBMIT, Scope.READ)
    requests = [{"handler": "noop", "n": 2, "task": {"k": k}, "tags": [f"t{k}"]} for k in range(3)]
    answer = world.post("/v1/rollouts", "a", {"requests": requests})
    rollouts = world.get("/v1/rollouts?limit=10", "a").json["rollouts"]
    tasks = {rollout["id"]: rollout["request"]["task"]["k"] for rollout in rollouts}
    assert [tasks[rollout["id"]] for rollout in answer.json["rollouts"]] == [0, 0, 1, 1, 2, 2]
    assert len(world.gate.rollouts.ids(tenant="a", tag="t1")) == 2


def test_who_asks_for_what_a_tag_has_under_way_need_not_look_at_all_that_it_ever_had(world):
    for tenant in ("a", "b"):
        world.key(tenant, Scope.SUBMIT, Scope.READ)
    store = world.gate.rollouts
    theirs = [world.submit(tenant, n=20, tags=["t"]).json["rollouts"][0]["id"] for tenant in ("a", "b")]
    for rollout_id in theirs:
        store.claim(rollout_id, 1, Stage.INIT, "w")
    assert set(store.ids(tenant="a", tag="t", state=State.INITIALIZING)) == set(theirs)
    for tag, ids in (("t", theirs[:1]), ("other", [])):
        listed = world.get(f"/v1/rollouts?tag={tag}&state=initializing", "a").json["rollouts"]
        assert [rollout["id"] for rollout in listed] == ids
    assert len(store.ids(tenant="a", tag="t", state=State.QUEUED)) == 20, "the caller looks at each"


def test_bytes_are_counted_until_the_requests_expire_and_no_longer(world):
    world.key("a", Scope.SUBMIT, Scope.READ)
    world.tenants.set(Tenant(name="a", quota_bytes=1 << 20))
    world.submit("a", n=3, task={"a": 1})
    batch_id = new_id()
    body = {"id": batch_id, "n": 2, "groups": 2, "max_in_flight": 2, "prompts": [{"handler": "noop"}] * 3}
    assert world.post("/v1/batches", "a", body).status_code == 202
    settle(world.gate)
    taken = used(world, "a")
    world.post(f"/v1/batches/{batch_id}/cancel", "a")
    settle(world.gate)
    end_all(world.gate, "a")
    name = keys.requests_of("a")
    kept = world.redis.zrange(name, 0, -1, withscores=True)
    assert len(kept) == 2 and all(score < float("inf") for _, score in kept)
    assert used(world, "a") == sum(int(member.split()[1]) for member, _ in kept) < taken
    for member, _ in kept:  # as if their time were over
        world.redis.delete(keys.request("a", member.split()[0]))
        world.redis.zadd(name, {member: 1})
    world.gate.rollouts.trim()
    assert used(world, "a") == 0 and not world.redis.exists(name)


def test_a_quota_of_bytes_says_when_it_is_full_and_when_it_never_will_do(world):
    world.key("a", Scope.SUBMIT, Scope.READ)
    world.tenants.set(Tenant(name="a", quota_bytes=4000))
    assert world.submit("a", task={"x": "y" * 2000}).status_code == 202
    full = world.submit("a", task={"x": "z" * 2000})
    assert full.status_code == 429 and full.headers["Retry-After"] == "5"
    assert "may have 4000 bytes of requests" in full.json["detail"]
    assert world.submit("a", task={"x": "y" * 2000}).status_code == 202, "it is kept already"
    assert world.submit("a", task={"x": "y" * 5000}).status_code == 403
    prompts = {"n": 1, "groups": 1, "prompts": [{"handler": "noop", "task": {"x": "y" * 2000}}]}
    assert world.post("/v1/batches", "a", prompts).status_code == 429
    assert world.get("/v1/batches", "a").json == {"batches": []}
    assert json.loads(world.tenants.get("a").model_dump_json())["quota_bytes"] == 4000


def test_a_request_that_fits_to_the_byte_is_taken_and_one_byte_more_is_not(world):
    world.key("a", Scope.SUBMIT, Scope.READ)
    assert world.submit("a", task={"k": 1}).status_code == 202
    size = used(world, "a")
    world.tenants.set(Tenant(name="a", quota_bytes=2 * size))
    assert world.submit("a", task={"k": 22}).status_code == 429
    assert world.submit("a", task={"k": 2}).status_code == 202
    assert used(world, "a") == 2 * size


def test_prompts_whose_bytes_were_taken_are_not_asked_for_them_again(world):
    """They fill the quota to its end, and start all the same."""
    prompt = RolloutRequest(handler="noop", task={"k": 1})
    world.tenants.set(Tenant(name="a", quota_bytes=len(prompt.model_dump_json())))
    batches = world.gate.batches
    batches.create(
        "mine", BatchRequest(prompts=[prompt], n=1, groups=1), "a", world.tenants.get("a").quota_bytes
    )
    settle(world.gate)
    assert len(world.gate.rollouts.ids(tenant="a")) == 1
