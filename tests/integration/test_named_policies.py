"""What the stores keep apart of several policies, and what an update of one leaves of the others."""

from __future__ import annotations

from unittest import mock

import pytest

from rollout.policy import PolicyRequest, UpdateState
from services.state.backends.store import BackendStore
from services.state.policy.store import PolicyStore, UpdateConflict
from tests.integration.test_policy_store import BACKEND, Engines, current_of, end, sglang
from workers.weights import WeightUpdates


@pytest.fixture
def redis(server):
    return server.client


@pytest.fixture
def store(redis):
    redis.flushall()
    return PolicyStore(redis)


@pytest.fixture
def fleet(redis, store):
    """Three backends that serve `v0`, which the fleet wants."""
    fleet = BackendStore(redis)
    for name in "abc":
        fleet.put(sglang(name))
    fleet.want_version("v0")
    return fleet


def test_updates_of_several_policies_are_each_claimed_by_whoever_comes(store, redis):
    request = PolicyRequest(version="v1", path="/a")
    made = {name: store.create(request, [BACKEND], name)[0] for name in ("default", "judge", "user")}
    assert sorted(redis.lrange("policy:bell", 0, -1)) == sorted(made), "one ring for each"
    works = [store.claim("worker", 30) for _ in range(4)]
    assert sorted(work.record.update.policy for work in works[:3]) == sorted(made) and works[3] is None
    with pytest.raises(UpdateConflict, match=f"/v1/policies/judge/updates/{made['judge'].id}"):
        store.create(PolicyRequest(version="v2", path="/b"), [BACKEND], "judge")
    judges = next(work for work in works if work.record.update.policy == "judge")
    judges.record.update.state = UpdateState.DONE
    store.finish(judges, current_of("v1"))
    assert [store.under_way(name) for name in made] == [True, False, True]
    assert store.current("judge").policy.version == "v1" and store.current() is None
    assert (store.totals("judge")["n_done"], store.totals()) == (1.0, {})
    assert store.get(made["judge"].id, "judge").state == "done" and store.get(made["judge"].id) is None
    assert store.status("judge").history[0].id == made["judge"].id
    assert store.claim("worker", 30) is None


def test_a_version_is_as_old_as_its_own_policy_says(store):
    for version in ("one", "two"):
        store.create(PolicyRequest(version=version, path="/a"), [BACKEND], "judge")
        end(store, current=current_of(version))
    store.create(PolicyRequest(version="one", path="/a"), [BACKEND])
    end(store, current=current_of("one"))
    assert [store.age("one", "judge"), store.age("two", "judge"), store.age("one")] == [1, 0, 0]
    assert store.age("two") == 1, "a version of another policy is one never seen"


def test_the_names_are_those_that_are_served_or_have_weights(store, fleet, redis):
    assert store.names() == {"default"}
    store.create(PolicyRequest(version="v"), [BACKEND], "judge")
    fleet.put(BACKEND.model_copy(update={"policies": {"left": "l", "right": "r"}}))
    assert store.names() == {"default", "judge", "left", "right"}
    with pytest.raises(UpdateConflict):
        store.forget("judge", gone=True)
    end(store)
    assert store.forget("judge", gone=True) == []
    assert store.names() == {"default", "left", "right"} and redis.keys("policy/judge:updates") == []


def test_an_update_of_a_policy_that_a_backend_serves_no_more_passes_it_over(store, fleet):
    fleet.put(BACKEND.model_copy(update={"policies": {"left": "l"}}))
    store.create(PolicyRequest(version="v1", path="/a"), [fleet.get("b")], "right")
    WeightUpdates(store, fleet, "worker").carry_out(store.claim("worker", 30))
    (update,) = store.status("right").history
    assert (update.state, update.backends["b"].state) == ("failed", "skipped")
    assert fleet.get("b").versions == {}


def test_an_engine_of_several_policies_that_another_update_has_for_too_long_is_left_alone(store, fleet):
    fleet.put(BACKEND.model_copy(update={"policies": {"left": "l", "right": "r"}}))
    lock = store.lock("b", 30)
    assert lock.acquire(blocking=False)
    store.create(PolicyRequest(version="v1", path="/a", lora={}, timeout_s=0.1), [fleet.get("b")], "left")
    WeightUpdates(store, fleet, "worker", lease_s=0.5).carry_out(store.claim("worker", 30))
    (update,) = store.status("left").history
    assert (
        update.state == "failed" and "another policy's update had the backend" in update.backends["b"].error
    )
    assert not fleet.get("b").paused and fleet.get("b").rejected == {}


@pytest.mark.parametrize(
    ("policies", "lora", "why"),
    [
        ({"left": "l", "right": "r"}, None, "a checkpoint would replace the weights of all"),
        ({"left": "l"}, {"name": "other"}, "serves policy 'left' as model 'l', and 'other' is another"),
    ],
)
def test_current_weights_of_another_kind_are_not_brought_to_who_comes_late(
    store, fleet, redis, policies, lora, why
):
    store.create(PolicyRequest(version="v1", path="/a"), [BACKEND], "left")
    current = current_of("v1")
    current.request = PolicyRequest(version="v1", path="/a", lora=lora)
    end(store, current=current)
    fleet.put(sglang("d").model_copy(update={"policies": policies, "policy": "left", "model": "l"}))
    engines = Engines(fleet)
    with engines, mock.patch("workers.weights.log") as told:
        assert WeightUpdates(store, fleet, "worker").bring_current(fleet.get("d").of("left")) is False
    assert why in told.info.call_args.kwargs["error"] and engines.asked == []
    assert not fleet.get("d").paused and fleet.get("d").rejected == {}


def test_a_backend_that_serves_a_policy_no_more_does_not_have_its_weights(store, fleet):
    fleet.put(sglang("a").model_copy(update={"policies": {"red": "m"}, "policy": "red"}))
    fleet.want_version("v0", policy="red")
    assert store.forget("red") == ["a"]
    fleet.put(sglang("a"))
    assert store.forget("red", gone=True) == [] and fleet.wanted_version("red") is None
    assert fleet.get("a").policy_version == "v0"


def test_a_policy_whose_adapter_is_absent_is_rejected_from_the_first_moment_on(fleet, redis):
    absent = {"left": "not loaded yet"}
    both = {"policies": {"left": "l", "right": "m"}, "policy": "left", "rejected": absent}
    fleet.put(sglang("a").model_copy(update=both | {"rejected": {}}))
    assert fleet.get("a").rejected == {}
    orders = []
    with mock.patch.object(
        fleet, "_do", lambda *args, _do=fleet._do, **more: orders.append(args) or _do(*args, **more)
    ):
        fleet.put(sglang("a").model_copy(update=both))
    assert orders == [("put",)] and fleet.get("a").rejected == absent
    assert not fleet.get("a", "left").healthy and fleet.get("a", "right").healthy
    fleet.put(sglang("a").model_copy(update=both | {"rejected": {}}))
    assert fleet.get("a").rejected == {}
