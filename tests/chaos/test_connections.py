"""Redis dies, freezes and drops connections; the gateway dies; clients walk away."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import httpx
import pytest
import redis

from rollout.schema import RolloutRequest, State, new_id
from tests.chaos.harness import PATIENCE_S, STAGES
from tests.helpers.keys import HEADER, http
from tests.helpers.long_forms import CHAOS
from tests.helpers.stack import wait_until

LEASES = 50
COUNT = CHAOS("rollouts", short=100, long=400)
RESTARTS = CHAOS("restarts of Redis", short=1, long=3)
CUTS = CHAOS("cuts of connections", short=10, long=30)
DEATHS = CHAOS("deaths of a gateway", short=1, long=3)


@pytest.fixture
def at_work(chaos):
    """Rollouts in RUN whose gates are shut, and some that are on their way; opened by `open_gates`."""
    gates = chaos.gates()
    (gates / "init").touch()
    ids = chaos.submit(LEASES, gates)
    chaos.wait_for_held(ids, "run", LEASES)
    ids += chaos.submit(LEASES, gates)

    def open_gates():
        for stage in STAGES:
            (gates / stage).touch()

    return ids, open_gates


def test_redis_killed_and_restarted_from_its_file_loses_no_rollout(chaos, at_work):
    ids, open_gates = at_work
    workers = dict(chaos.workers)
    for _ in range(RESTARTS):
        chaos.restart_redis()
    open_gates()
    chaos.require_exact(ids)
    ids = chaos.submit(5)
    chaos.require_exact(ids)
    assert all(worker.popen.poll() is None for worker in workers.values()), "no worker went with Redis"


def test_connections_cut_again_and_again_lose_no_rollout_and_no_cancel(chaos, at_work):
    ids, open_gates = at_work
    victims = ids[:5]
    with redis.Redis(port=chaos.redis.port) as admin:
        for number in range(CUTS):
            for kind in ("normal", "pubsub"):
                admin.client_kill_filter(_type=kind, skipme=True)
            if number < len(victims):
                chaos.cancel(victims[number])
        open_gates()
        for kind in ("normal", "pubsub"):
            admin.client_kill_filter(_type=kind, skipme=True)
    chaos.require_exact(ids)
    for rollout_id in victims:
        # Asked for while its worker could not be told, or just before it finished: never half of both.
        item = chaos.client.get(rollout_id, include="summary")
        assert item.state is State.CANCELLED and item.reward is None and item.drop


def test_a_gateway_killed_while_it_accepts_creates_nothing_twice_when_asked_again(chaos):
    """The client knows no answer; it sends the same ids again until it gets one."""
    ids, errors = [new_id() for _ in range(COUNT)], []
    killed = threading.Event()

    def submit(chunk):
        body = {"requests": [{"handler": "gated", "id": i} for i in chunk]}
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                answer = http.post(f"{chaos.url}/v1/rollouts", json=body, timeout=10)
                if answer.status_code == 202:
                    assert [rollout["id"] for rollout in answer.json()["rollouts"]] == chunk
                    return
            except httpx.HTTPError as error:
                errors.append(error)
            time.sleep(0.05)

    def submit_all(chunks):
        for chunk in chunks:
            submit(chunk)
        # Whoever is done before the gateway dies asks again for what there is.
        while not killed.is_set():
            submit(chunks[-1])

    chunks = [ids[k : k + 5] for k in range(0, len(ids), 5)]
    threads = [threading.Thread(target=submit_all, args=(chunks[k::4],)) for k in range(4)]
    for thread in threads:
        thread.start()
    for number in range(DEATHS):
        count = (number + 1) * COUNT // 4
        wait_until(lambda count=count: chaos.record_count(ids) >= count, PATIENCE_S, f"{count} accepted")
        chaos.restart_gateway()
    killed.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert chaos.record_count(ids) == len(ids)
    assert errors, "the gateway was never away: this tested nothing"
    chaos.require_exact(ids)
    members = chaos.redis.client.zcount("rollouts:created", "-inf", "+inf")
    assert members == len(set(chaos.redis.client.zrange("rollouts:created", 0, -1)))


def test_clients_that_leave_their_long_polls_hold_nothing(chaos):
    gates = chaos.gates()
    (rollout_id,) = chaos.submit(1, gates)
    for _ in range(40):
        with socket.create_connection(("127.0.0.1", chaos.port)) as raw:
            raw.sendall(f"GET /v1/rollouts/{rollout_id}?wait=3 HTTP/1.1\r\nHost: x\r\n{HEADER}\r\n".encode())
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert http.get(f"{chaos.url}/health", timeout=PATIENCE_S).status_code == 200
    for stage in STAGES:
        (gates / stage).touch()
    chaos.require_exact([rollout_id])
    threads = sum(1 for _ in Path(f"/proc/{chaos.gateway.pid}/task").iterdir())
    assert threads < 200, "waits end with their time, and threads are used again"
    (new,) = chaos.client.submit(RolloutRequest(handler="gated"))
    assert chaos.client.wait(new.id, PATIENCE_S).state is State.COMPLETED
