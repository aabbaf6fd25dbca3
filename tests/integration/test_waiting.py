"""Requests that wait: they hold no thread, are woken by what they wait for, and leave nothing behind.

More clients wait at each gateway here than it has threads.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from urllib.parse import urlsplit

import psutil
import pytest

from rollout.client import Client
from rollout.schema import RolloutRequest
from services.state.fleet import FleetStore
from tests.helpers.gateways import started_gateway
from tests.helpers.idle import in_time
from tests.helpers.keys import HEADER, http, metric
from tests.helpers.stack import Stack, free_port, wait_until
from tests.helpers.waiters import Waiters
from workers.handlers.noop import Noop

PATIENCE_S = 120.0
SOON_S = 1.0
"""For those who wait to be answered, at an idle service."""
POLLS, CURSORS, STREAMS = 200, 50, 50
WAIT = "wait=600&include=summary"
"""Longer than any test: whoever is answered was woken, or told that the gateway stops."""
ENV = {"ROLLOUT_MAX_WAIT_S": "600", "ROLLOUT_SSE_HEARTBEAT_S": "600", "ROLLOUT_LOG_LEVEL": "WARNING"}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Redis and a gateway that knows a handler, without workers: what is submitted stays queued."""
    directory = tmp_path_factory.mktemp("waiting")
    with Stack(directory, directory / "sbx", ENV) as stack:
        FleetStore(stack.redis.client).put_handlers([Noop().info()])
        yield stack


@pytest.fixture(scope="module")
def usual(service):
    """Its gateway, with 64 threads."""
    process = service.gateway
    process.url, process.port, process.client = service.url, service.port, service.client
    return process


@pytest.fixture(scope="module")
def small(service):
    """Another one, with 16 threads and 40 places."""
    env = {"ROLLOUT_GATEWAY_WAITERS": "40"}
    # However slow the machine: whoever waits when it stops gets an answer.
    with started_gateway(service, "gateway-small", free_port(), env, graceful_s=60) as process:
        process.port, process.client = urlsplit(process.url).port, Client(process.url)
        yield process


def wait_at(process, paths):
    return Waiters("127.0.0.1", process.port, paths)


def submitted(process, count, tag):
    return [item.id for item in process.client.submit([RolloutRequest(handler="noop", n=count, tags=[tag])])]


def waiting(process):
    return metric(process.url, "rollout_gateway_waiters")


def until_waiting(process, count):
    wait_until(lambda: waiting(process) == count, PATIENCE_S, f"{count} waiters", process)


def end(process, tag):
    process.client.cancel_many(tag=tag)


def test_many_that_wait_leave_the_gateway_to_others(usual):
    ids = submitted(usual, POLLS, "many")
    paths = [f"/v1/rollouts/{rollout_id}?{WAIT}" for rollout_id in ids]
    paths += [f"/v1/results?cursor=$&tag=many&limit=1&{WAIT}"] * CURSORS
    paths += ["/v1/results/stream?cursor=$&tag=others&include=summary"] * STREAMS
    with wait_at(usual, paths) as waiters:
        until_waiting(usual, len(paths))
        (third,) = submitted(usual, 1, "others")
        assert usual.client.get(third).state == "queued"
        assert waiters.read() is None and waiting(usual) == len(paths), "all of that while they wait"
        end(usual, "others")
        streams = range(POLLS + CURSORS, len(paths))
        announced = lambda: all(third.encode() in waiters.received[k] for k in streams)  # noqa: E731
        assert waiters.read_until(announced, PATIENCE_S), "a stream goes on where it was parked"
        assert not any(waiters.received[: POLLS + CURSORS]), "nobody else was woken"
        with in_time(SOON_S, 60):
            end(usual, "many")
            assert waiters.read_answers(PATIENCE_S)
        assert waiters.statuses() == [200] * len(paths)
        assert all(b'"cancelled"' in answer for answer in waiters.received[: POLLS + CURSORS])
        until_waiting(usual, STREAMS)
    until_waiting(usual, 0)


def test_a_client_that_hangs_up_frees_its_place_before_its_wait_is_over(usual):
    (rollout_id,) = submitted(usual, 1, "left")
    path = f"/v1/rollouts/{rollout_id}?{WAIT}"
    with wait_at(usual, [path] * 40 + ["/v1/results/stream?cursor=$"] * 10) as waiters:
        until_waiting(usual, 50)
        waiters.leave(range(0, 50, 2))
        until_waiting(usual, 25)
    until_waiting(usual, 0)
    end(usual, "left")


def test_all_that_wait_share_one_connection_to_redis(service, usual):
    ids = submitted(usual, 60, "shared")

    def readers():
        return [c for c in service.redis.client.client_list() if c["cmd"] == "xread"]

    with wait_at(usual, [f"/v1/rollouts/{rollout_id}?{WAIT}" for rollout_id in ids]):
        until_waiting(usual, 60)
        wait_until(lambda: len(readers()) == 1, PATIENCE_S, "one reader")
    until_waiting(usual, 0)
    end(usual, "shared")


def test_a_connection_serves_on_after_its_wait_and_a_request_sent_early_is_not_lost(usual):
    (rollout_id,) = submitted(usual, 1, "early")
    head = f"HTTP/1.1\r\nHost: 127.0.0.1:{usual.port}\r\n{HEADER}\r\n"
    with socket.create_connection(("127.0.0.1", usual.port), PATIENCE_S) as connection:
        connection.sendall(f"GET /v1/rollouts/{rollout_id}?{WAIT} {head}".encode())
        until_waiting(usual, 1)
        connection.sendall(f"GET /health {head}".encode())
        assert waiting(usual) == 1
        end(usual, "early")
        answers = b""
        while b'{"status":"ok"}' not in answers:
            data = connection.recv(1 << 16)
            assert data, answers
            answers += data
        assert answers.index(b'"cancelled"') < answers.index(b'{"status":"ok"}')
        connection.sendall(f"GET /health {head}".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_who_waits_is_answered_when_the_wait_is_over(usual):
    (rollout_id,) = submitted(usual, 1, "over")
    began = time.monotonic()
    with in_time(0.4 + SOON_S, 60), wait_at(usual, [f"/v1/rollouts/{rollout_id}?wait=0.4"] * 30) as waiters:
        assert waiters.read_answers(PATIENCE_S)
        assert min(waiters.answered_at) - began >= 0.4
        assert all(b'"queued"' in answer for answer in waiters.received)
    end(usual, "over")


def test_clients_that_come_and_go_get_what_they_ask_and_leave_nothing(usual):
    (worker,) = psutil.Process(usual.pid).children()
    (rollout_id,) = submitted(usual, 1, "lasts")
    wrong = []

    def come_and_go(number):
        draw = random.Random(number)
        for _ in range(15):
            wait = f"wait={draw.uniform(0.001, 0.1):.3f}&include=summary"
            paths = [f"/v1/rollouts/{rollout_id}?{wait}", f"/v1/results?cursor=$&{wait}"]
            path = draw.choice([*paths, "/v1/results/stream?cursor=$&include=summary"])
            with wait_at(usual, [path]) as waiter:
                if draw.random() < 0.4:
                    waiter.read(draw.uniform(0, 0.1))
                elif not waiter.read_answers(PATIENCE_S) or waiter.statuses() != [200]:
                    wrong.append((path, waiter.received))

    readers = [threading.Thread(target=come_and_go, args=(number,)) for number in range(16)]
    for reader in readers:
        reader.start()
    while any(reader.is_alive() for reader in readers):
        submitted(usual, 3, "ends")
        end(usual, "ends")
    assert wrong == []
    until_waiting(usual, 0)
    assert psutil.Process(usual.pid).children() == [worker], "the same process to the end"
    end(usual, "lasts")


def test_a_reload_and_a_stop_answer_all_who_wait(small):
    """The last of the small gateway: it ends."""
    (rollout_id,) = submitted(small, 1, "stop")
    paths = [f"/v1/rollouts/{rollout_id}?{WAIT}"] * 30 + ["/v1/results/stream?cursor=$"] * 10
    for stop in (signal.SIGHUP, signal.SIGTERM):
        with wait_at(small, paths) as waiters:
            until_waiting(small, len(paths))
            os.kill(small.pid, stop)
            assert waiters.read_until(lambda: all(waiters.closed), PATIENCE_S)
            assert all(b'"queued"' in data for data in waiters.received[:30])
            # A stream has ended in order, as its last chunk says.
            assert all(data.endswith(b"0\r\n\r\n") for data in waiters.received[30:])
        if stop == signal.SIGHUP:
            wait_until(lambda: waiting(small) == 0, PATIENCE_S, "the new worker to answer")
    assert small.popen.wait(PATIENCE_S) == 0


def test_when_redis_dies_who_waits_goes_on_waiting_and_is_told_when_the_wait_is_over(service, usual):
    """The last of this file: it is the service's Redis."""
    (worker,) = psutil.Process(usual.pid).children()
    ids = submitted(usual, 8, "dies")
    patient, brief = range(8), range(8, 12)
    paths = [f"/v1/rollouts/{rollout_id}?{WAIT}" for rollout_id in ids]
    # Long enough for Redis to be gone before, on a slow machine too.
    paths += [f"/v1/rollouts/{rollout_id}?wait=8&include=summary" for rollout_id in ids[: len(brief)]]
    began = time.monotonic()
    with wait_at(usual, paths) as waiters:
        until_waiting(usual, len(paths))
        service.redis.crash()
        try:
            newcomer = http.get(f"{usual.url}/v1/rollouts/{ids[0]}?{WAIT}", timeout=PATIENCE_S)
            assert newcomer.status_code == 503 and int(newcomer.headers["Retry-After"]) > 0
            waiters.read(0.5)
            # The time of the others is measured below; on a slow machine it may be over by now.
            assert not any(waiters.received[k] for k in patient), "who waited already waits on"
            assert waiters.read_answers(PATIENCE_S, brief)
            assert min(waiters.answered_at[k] for k in brief) - began >= 8
            assert waiters.statuses() == [None] * len(patient) + [503] * len(brief)
            assert all(b"Retry-After" in waiters.received[k] for k in brief)
        finally:
            service.redis = service.redis.restarted()
        until_waiting(usual, len(patient))
        end(usual, "dies")
        assert waiters.read_answers(PATIENCE_S, patient), "the same requests, as soon as there is an answer"
        assert waiters.statuses() == [200] * len(patient) + [503] * len(brief)
        assert all(b'"cancelled"' in waiters.received[k] for k in patient)
    until_waiting(usual, 0)
    assert psutil.Process(usual.pid).children() == [worker], "no process ended of it"
