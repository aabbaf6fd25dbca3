"""Bundles from a client to a node: the gateway's door, tenants' walls and quota, and the node's cache."""

from __future__ import annotations

import asyncio
import os
import threading
import time

import pytest

from rollout.schema import RolloutRequest
from rollout.suites.bundles import pack
from services.settings import Settings
from services.state import bundles as state
from services.state import keys
from services.state.api_keys import Scope
from services.state.bundles import BundlesFull, BundleStore
from tests.unit.test_bundles import archive, member
from workers import bundles
from workers.bundles import BundleCache
from workers.errors import InfrastructureError, TaskError

GZIP = "application/gzip"


@pytest.fixture
def bundle(tmp_path):
    (tmp_path / "task" / "tests").mkdir(parents=True)
    (tmp_path / "task" / "tests" / "test.sh").write_text("true\n")
    return pack(tmp_path / "task")


@pytest.fixture
def tenants(world):
    for name in ("a", "b"):
        world.key(name, Scope.SUBMIT, Scope.READ)
    return world


def put(world, who, bundle, media=GZIP, digest=None):
    path = f"/v1/bundles/{digest or bundle.digest}"
    return world.call("PUT", path, who, data=bundle.content, content_type=media)


def head(world, who, digest):
    return world.call("HEAD", f"/v1/bundles/{digest}", who).status_code


def test_a_bundle_is_taken_once_and_is_its_tenants_alone(tenants, bundle):
    assert head(tenants, "a", bundle.digest) == 404
    first, again = put(tenants, "a", bundle), put(tenants, "a", bundle)
    assert (first.status_code, first.json["created"]) == (201, True)
    assert (again.status_code, again.json["created"]) == (200, False)
    assert [head(tenants, who, bundle.digest) for who in "ab"] == [200, 404]
    assert tenants.get(f"/v1/bundles/{bundle.digest}", "a").status_code == 405
    assert put(tenants, "b", bundle).status_code == 201
    size = len(bundle.content)
    assert tenants.gate.bundles.stored() == {"a": size, "b": size}
    assert tenants.gate.bundles.totals()["new"] == 2 and tenants.gate.bundles.totals()["there"] == 1
    tenants.key("ops", Scope.METRICS)
    text = tenants.get("/metrics", "ops").text
    assert f'rollout_bundles_bytes{{tenant="b"}} {size:.1f}' in text
    assert 'rollout_bundles_total{event="new"} 2.0' in text


def test_only_keys_that_may_submit_put_bundles(tenants, bundle):
    tenants.key("reader", Scope.READ)
    assert put(tenants, "reader", bundle).status_code == 403
    assert put(tenants, None, bundle).status_code == 401
    assert tenants.redis.keys("bundle*") == []


def test_what_is_no_bundle_is_refused_by_the_gateway(tenants, bundle):
    evil = archive(member("../evil", data=b"x"))
    zeros = archive(member("zeros", data=bytes(1 << 20)))
    for content, digest, words in [
        (bundle.content, "0" * 64, f"the bundle's digest is {bundle.digest}, not {'0' * 64}"),
        (bundle.content, bundle.digest.upper(), "no SHA-256 in 64 lower-case hexadecimal digits"),
        (bundle.content[:-9], bundle.digest, "ends too early"),
        (*evil, "'../evil', which is no path in it"),
        (b"", bundle.digest, "ends too early"),
    ]:
        answer = tenants.call("PUT", f"/v1/bundles/{digest}", "a", data=content, content_type=GZIP)
        assert answer.status_code == 400 and words in answer.json["detail"]
    assert (
        tenants.call("PUT", f"/v1/bundles/{zeros[1]}", "a", data=zeros[0], content_type=GZIP).status_code
        == 201
    )
    for media in ("application/json", "text/plain", "multipart/form-data; boundary=x"):
        answer = put(tenants, "a", bundle, media)
        assert (answer.status_code, answer.json["detail"]) == (415, "send Content-Type: application/gzip")
    # Every other route still takes nothing but JSON.
    answer = tenants.call("POST", "/v1/rollouts", "a", data=bundle.content, content_type=GZIP)
    assert answer.status_code == 415


def test_the_api_describes_the_two_calls(tenants):
    paths = tenants.get("/openapi.json").json["paths"]["/v1/bundles/{digest}"]
    assert set(paths) == {"put", "head"}
    assert [*paths["put"]["requestBody"]["content"]] == [GZIP]
    assert {"200", "201", "400", "413", "415"} <= set(paths["put"]["responses"])


def test_a_quota_that_is_full_takes_no_more_until_old_ones_may_go(world, bundle, monkeypatch):
    store = BundleStore(world.redis, Settings(redis_url=world.url, bundles_mb=1))
    noise = [os.urandom(400_000) for _ in range(3)]
    digests = [f"{number:064}" for number in range(3)]
    assert store.put("a", digests[0], noise[0]) and store.put("a", digests[1], noise[1])
    with pytest.raises(
        BundlesFull, match=r"tenant 'a' may have 1048576 bytes of bundles, used 800000 in a day"
    ):
        store.put("a", digests[2], noise[2])
    assert store.put("b", digests[2], noise[2])
    assert store.fetch("a", digests[0]) == noise[0] and store.stored()["a"] == 800_000
    assert world.redis.keys("bundle:part:*") == []
    # The one that is used is not the one that goes.
    world.redis.zadd(keys.bundles_of("a"), {digests[1]: 0, digests[0]: 1})
    assert store.use("a", digests[0])
    monkeypatch.setattr(state, "KEEP_S", 10**9)
    patient = BundleStore(world.redis, Settings(redis_url=world.url, bundles_mb=1))
    assert patient.put("a", digests[2], noise[2])
    assert [store.use("a", digest) for digest in digests] == [True, False, True]
    assert store.stored()["a"] == 800_000 and store.totals()["refused"] == 1


def test_what_nobody_used_for_a_month_is_forgotten(world):
    store = world.gate.bundles
    store.put("a", "0" * 64, b"x" * 10)
    world.redis.zadd(keys.bundles_of("a"), {"0" * 64: 1})
    store.put("a", "1" * 64, b"y" * 5)
    assert not store.use("a", "0" * 64) and store.stored() == {"a": 5}


def test_a_tenant_that_sends_no_more_keeps_no_memory_for_ever(world):
    store = BundleStore(world.redis, Settings(redis_url=world.url))
    store.put("a", "0" * 64, b"x")
    key = keys.bundle("a", "0" * 64)
    assert 0 < world.redis.pttl(key) <= state.KEEP_S * 1000
    world.redis.pexpire(key, 60_000)
    assert store.use("a", "0" * 64)
    assert world.redis.pttl(key) > state.KEEP_S * 999, "each use counts"
    world.redis.delete(key)
    assert not store.use("a", "0" * 64)
    assert store.stored()["a"] == 0


def test_two_puts_at_once_leave_one_bundle(world):
    content, answers = os.urandom((3 << 20) + 5), []
    stores = [BundleStore(world.redis, world.gate.settings) for _ in range(4)]
    threads = [
        threading.Thread(target=lambda store=store: answers.append(store.put("a", "2" * 64, content)))
        for store in stores
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(answers) == [False, False, False, True]
    assert stores[0].fetch("a", "2" * 64) == content and stores[0].stored() == {"a": len(content)}
    assert world.redis.keys("bundle:part:*") == []


# ------------------------------------------------------------------------------------ on a node


def submitted(world, tenant="a"):
    """A rollout of the tenant."""
    (rollout,) = world.gate.dispatcher.submit(
        [RolloutRequest(handler="noop")], world.gate.tenants.get(tenant)
    )
    return rollout.id


@pytest.fixture
def cache(world, tmp_path):
    return BundleCache(Settings(redis_url=world.url, bundle_cache=str(tmp_path / "cache")))


def test_a_node_fetches_a_bundle_once_and_has_it_when_redis_lost_it(world, cache, bundle):
    world.gate.bundles.put("a", bundle.digest, bundle.content)
    paths = [cache.unpacked(bundle.digest, submitted(world)) for _ in range(3)]
    assert len({*paths}) == 1 and (paths[0] / "tests" / "test.sh").read_text() == "true\n"
    assert pack(paths[0]) == bundle
    assert world.gate.bundles.totals()["fetched"] == 1
    rollout_id = submitted(world)
    world.redis.delete(keys.bundle("a", bundle.digest))
    assert cache.unpacked(bundle.digest, rollout_id) == paths[0]


def test_a_bundle_that_is_nowhere_is_the_tasks_failure_and_says_what_to_do(world, cache, bundle):
    world.gate.bundles.put("a", bundle.digest, bundle.content)
    world.redis.delete(keys.bundle("a", bundle.digest))  # as a Redis that lost its last second
    with pytest.raises(
        TaskError, match=r"neither on this node nor in Redis.*send it again, with `rollout submit`"
    ):
        cache.unpacked(bundle.digest, submitted(world))
    assert world.gate.bundles.stored() == {"a": 0} and world.gate.bundles.totals()["missing"] == 1
    assert world.gate.bundles.put("a", bundle.digest, bundle.content)
    assert cache.unpacked(bundle.digest, submitted(world)).is_dir()
    with pytest.raises(TaskError, match="is no digest of a bundle"):
        cache.unpacked("../x", submitted(world))


def test_another_tenants_rollout_does_not_read_a_bundle_by_its_digest(world, cache, bundle):
    world.gate.bundles.put("a", bundle.digest, bundle.content)
    cache.unpacked(bundle.digest, submitted(world))
    for rollout_id in (submitted(world, "b"), "nobody's"):
        with pytest.raises(TaskError, match="neither on this node nor in Redis"):
            cache.unpacked(bundle.digest, rollout_id)


def test_a_damaged_bundle_is_none(world, cache, bundle):
    world.gate.bundles.put("a", bundle.digest, bundle.content)
    world.redis.lset(keys.bundle("a", bundle.digest), 0, bundle.content[:-20])
    with pytest.raises(TaskError, match="neither on this node nor in Redis"):
        cache.unpacked(bundle.digest, submitted(world))
    assert not (cache.directory / "a" / bundle.digest).exists()


def test_workers_that_unpack_one_at_once_get_the_same_tree(world, tmp_path, bundle):
    world.gate.bundles.put("a", bundle.digest, bundle.content)
    config = Settings(redis_url=world.url, bundle_cache=str(tmp_path / "cache"))
    ids, caches = [submitted(world) for _ in range(6)], [BundleCache(config) for _ in range(6)]

    async def all_at_once():
        calls = zip(caches, ids, strict=True)
        return await asyncio.gather(*(asyncio.to_thread(c.unpacked, bundle.digest, i) for c, i in calls))

    assert len({*asyncio.run(all_at_once())}) == 1
    left = {path.name for path in (tmp_path / "cache" / "a").iterdir()}
    assert left == {bundle.digest, f"{bundle.digest}.bytes"}


def test_a_group_that_waits_for_its_bundle_leaves_the_others_their_threads(tmp_path, monkeypatch):
    free = threading.Event()

    class Slow:
        def here(self, digest, rollout_id):
            return None

        def unpacked(self, digest, rollout_id):
            assert free.wait(20)
            return tmp_path

    monkeypatch.setattr(bundles, "_cache", Slow)

    async def begin() -> list:
        group = [asyncio.create_task(bundles.unpacked("0" * 64, "r")) for _ in range(64)]
        await asyncio.sleep(0.1)
        assert await asyncio.wait_for(bundles.ask(lambda: 1), 5) == 1
        free.set()
        return await asyncio.gather(*group)

    assert {*asyncio.run(begin())} == {tmp_path}


def test_what_was_used_longest_ago_makes_room_and_nothing_that_is_in_use(world, tmp_path, bundle):
    config = Settings(redis_url=world.url, bundle_cache=str(tmp_path / "cache"), bundle_cache_mb=1)
    cache, made = BundleCache(config), []
    for number in range(3):
        (tmp_path / "task" / "noise").write_bytes(os.urandom(500_000))
        made.append(pack(tmp_path / "task"))
        path = cache.keep(made[-1])
        if number < 2:
            os.utime(path, (number, number))  # long ago
    there = [(cache.directory / bundles.KEPT / found.digest).is_dir() for found in made]
    assert there == [False, True, True]
    cache.keep(bundle)  # the second goes; the third was used just now, and stays beyond the quota
    cache.keep(made[0])
    there = [(cache.directory / bundles.KEPT / found.digest).is_dir() for found in made]
    assert there == [True, False, True]


def test_a_tenant_cannot_fill_a_node_by_small_bundles_of_large_files(world, tmp_path):
    store = BundleStore(world.redis, Settings(redis_url=world.url))
    config = Settings(redis_url=world.url, bundle_cache=str(tmp_path / "cache"), bundle_cache_mb=2)
    cache, made = BundleCache(config), []
    for number in range(3):
        content, digest = archive(member(f"zeros{number}", data=bytes(1_000_000)))
        store.put("a", digest, content)
        made.append(digest)
    rollout = "r" * 32
    world.redis.hset(keys.record(rollout), "tenant", "a")
    first = cache.unpacked(made[0], rollout)
    cache.unpacked(made[1], rollout)
    with pytest.raises(InfrastructureError, match="tenant 'a' has unpacked more"):
        cache.unpacked(made[2], rollout)
    assert first.is_dir() and not (cache.directory / "a" / made[2]).exists()
    long_ago = time.time() - bundles.OWN_IN_USE_S - 1
    os.utime(first, (long_ago, long_ago))
    cache.unpacked(made[2], rollout)
    assert not first.exists()


def test_what_a_killed_process_left_is_removed(world, cache, bundle):
    stale = cache.directory / "a" / ".0.dead"
    stale.mkdir(parents=True)
    os.utime(stale, (1, 1))
    cache.keep(bundle)
    assert not stale.exists()


def test_a_directory_of_somebody_elses_is_not_used(tmp_path, world, bundle):
    (tmp_path / "link").symlink_to(tmp_path)
    cache = BundleCache(Settings(redis_url=world.url, bundle_cache=str(tmp_path / "link")))
    with pytest.raises(InfrastructureError, match="cannot be unpacked"):
        cache.keep(bundle)


def test_a_run_without_a_service_finds_what_it_kept(tmp_path, bundle, monkeypatch):
    nowhere = Settings(redis_url="redis://127.0.0.1:1/0", bundle_cache=str(tmp_path / "cache"))
    monkeypatch.setattr(bundles, "settings", lambda: nowhere)
    bundles._cache.cache_clear()
    try:
        path = bundles.keep(bundle)
        assert asyncio.run(bundles.unpacked(bundle.digest, "r")) == path and pack(path) == bundle
    finally:
        bundles._cache.cache_clear()
