"""How many may wait at a gateway, and for how long: a gateway in this process, whose threads wait."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.gateway.context import EXTENSION
from tests.helpers.stack import wait_until

PATIENCE_S = 120
WAIT = "wait=30&include=summary"


@pytest.fixture
def gateway(world):
    """Starts the world's gateway with settings; two tenants have keys and a rollout each that is queued."""

    def start(**settings):
        world.app = world.start(**settings)
        for tenant in "ab":
            world.key(tenant)
        rollouts = {tenant: world.submit(tenant).json["rollouts"][0]["id"] for tenant in "ab"}
        return rollouts, world.app.extensions[EXTENSION].waiting

    return start


def test_as_many_wait_as_may_and_one_more_is_told_to_come_back(world, gateway):
    ids, room = gateway(gateway_waiters=2, gateway_tenant_share=1.0)
    path = f"/v1/rollouts/{ids['a']}"
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(world.get, f"{path}?{WAIT}", "a") for _ in range(2)]
        wait_until(lambda: room.open == 2, PATIENCE_S, "both to wait")
        for target in (f"/v1/rollouts/{ids['b']}?{WAIT}", f"/v1/results?cursor=$&{WAIT}"):
            refused = world.get(target, "b")
            assert refused.status_code == 503 and int(refused.headers["Retry-After"]) > 0
            assert "ROLLOUT_GATEWAY_WAITERS" in refused.json["detail"]
        assert world.get(path, "a").json["state"] == "queued", "no wait, no place"
        assert room.open == 2
        world.post(f"{path}/cancel", "a")
        assert [call.result(PATIENCE_S).json["state"] for call in waiting] == ["cancelled"] * 2
    assert room.open == 0


def test_a_tenant_has_its_share_of_those_places_and_leaves_the_rest_to_others(world, gateway):
    ids, room = gateway(gateway_waiters=3, gateway_tenant_share=0.5)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(world.get, f"/v1/rollouts/{ids[who]}?{WAIT}", who) for who in "aab"]
        wait_until(lambda: room.open == 3, PATIENCE_S, "all to wait")
        assert world.get(f"/v1/rollouts/{ids['a']}?{WAIT}", "a").status_code == 429
        assert world.get(f"/v1/rollouts/{ids['b']}?{WAIT}", "b").status_code == 503
        for who in "ab":
            world.post(f"/v1/rollouts/{ids[who]}/cancel", who)
        assert [call.result(PATIENCE_S).json["state"] for call in waiting] == ["cancelled"] * 3
    assert room.open == 0


@pytest.mark.parametrize("path", ["/v1/rollouts/{}", "/v1/results?cursor=$"])
def test_a_wait_lasts_as_long_as_asked_and_no_longer_than_the_limit(world, gateway, path):
    ids, _ = gateway(max_wait_s=0.3)
    path = path.format(ids["a"])
    path += "&" if "?" in path else "?"
    for refused in ("0.31", "-1", "nan", "inf"):
        answer = world.get(f"{path}wait={refused}", "a")
        assert answer.status_code == 400 and "wait" in answer.json["errors"][0]["field"]
    before = time.monotonic()
    answer = world.get(f"{path}wait=0.3", "a")
    assert answer.status_code == 200 and time.monotonic() - before >= 0.3
    assert answer.json.get("state", "queued") == "queued" and not answer.json.get("rollouts")
