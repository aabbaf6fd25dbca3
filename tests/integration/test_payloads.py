"""Large values straight from the socket of a real Redis: whole, in order; and the connection goes on."""

from __future__ import annotations

import socket
import threading
import time

import pytest
import redis

from services.state import payloads
from services.state.redis import connect

NAMES = [f"large{k}" for k in range(20)]


@pytest.fixture(scope="module")
def values(server):
    client = connect(server.url)
    kept = {name: bytes([k]) * (150_000 * k) + b"\r\n$5\r\n" for k, name in enumerate(NAMES)}
    for name, value in kept.items():
        client.set(name, value)
    return kept


@pytest.fixture
def client(server, values):
    # One connection, so that each test sees whether what it left there is right.
    return connect(server.url, max_connections=1)


def sizes(values):
    return [len(values[name]) for name in NAMES]


def test_values_come_whole_and_the_connection_goes_on_as_before(client, values):
    for _ in range(3):
        assert list(payloads.stream(client, NAMES, sizes(values))) == list(values.values())
        timeout = client.connection_pool.get_connection()
        assert timeout._sock.gettimeout() == client.connection_pool.connection_kwargs["socket_timeout"]
        client.connection_pool.release(timeout)
        assert client.echo("next") == "next" and client.strlen(NAMES[1]) == len(values[NAMES[1]])


@pytest.mark.parametrize("at", [0, 3, len(NAMES) - 1])
@pytest.mark.parametrize("wrong", ["absent", "empty", "tiny", "longer", "shorter"])
def test_a_value_that_has_changed_is_an_error_and_what_is_left_is_nobody_elses_reply(
    client, values, wrong, at
):
    names, expected = list(NAMES), sizes(values)
    if wrong in ("longer", "shorter"):
        expected[at] += 1 if wrong == "longer" else -1
    else:
        names[at] = wrong
        client.mset({"empty": "", "tiny": "1"})
    found, began = [], time.monotonic()
    with pytest.raises(payloads.PayloadError, match=f"{names[at]} is not what it was"):
        for value in payloads.stream(client, names, expected):
            found.append(value)
    assert time.monotonic() - began < 5, "it waits for nothing that will not come"
    assert found == list(values.values())[:at]
    assert client.echo("next") == "next"


def test_a_refusal_is_an_error_and_no_value(client, values):
    client.execute_command("ACL", "SETUSER", "default", "-mget")
    try:
        with pytest.raises(redis.ResponseError, match="refuses"):
            list(payloads.stream(client, NAMES, sizes(values)))
    finally:
        client.execute_command("ACL", "SETUSER", "default", "+@all")
    assert client.echo("next") == "next"


def test_a_reader_that_leaves_early_leaves_the_connection_to_others(client, values):
    reading = payloads.stream(client, NAMES, sizes(values))
    assert next(reading) == values[NAMES[0]]
    reading.close()
    assert client.echo("next") == "next"
    never_begun = payloads.stream(client, NAMES, sizes(values))
    assert client.echo("next") == "next", "it takes a connection when it is read, and not before"
    never_begun.close()


def test_a_server_that_stalls_or_ends_within_a_value_is_named_as_for_any_command():
    listening = socket.create_server(("127.0.0.1", 0))

    def serve(then):
        with listening.accept()[0] as peer:
            peer.recv(1 << 16)
            peer.sendall(b"*2\r\n$9\r\nwhole one\r\n$100\r\n" + b"x" * 50)
            then()

    pool = redis.ConnectionPool(
        host="127.0.0.1", port=listening.getsockname()[1], socket_timeout=0.5, protocol=2, driver_info=None
    )
    client = redis.Redis(connection_pool=pool)
    done = threading.Event()
    for then, error in ((lambda: None, redis.ConnectionError), (done.wait, redis.ConnectionError)):
        thread = threading.Thread(target=serve, args=(then,))
        thread.start()
        reading = payloads.stream(client, ["a", "b"], [9, 100])
        assert next(reading) == b"whole one"
        began = time.monotonic()
        with pytest.raises(error, match="50 bytes early"):
            next(reading)
        assert time.monotonic() - began < 5
        done.set()
        thread.join(5)
    listening.close()
