"""What threads of a process ask of Redis at the same time."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import redis

from services.settings import Settings
from services.state.redis import connect
from services.state.rollouts.store import RolloutStore
from services.state.together import ALONE_BYTES, MOST_AT_ONCE, Together

THREADS = 2 * MOST_AT_ONCE
"""More than one round trip takes."""


@pytest.fixture
def client(server):
    server.client.flushall()
    with connect(server.url) as client:
        yield client


@pytest.fixture
def together(client):
    return Together(client)


def at_the_same_time(together, monkeypatch, ask):
    """What `ask(number)` answers in each thread, all having asked before the first answer; and the
    sizes of the round trips."""
    trips, all_ask = [], Event()
    answers = together._answers

    def slow(commands):
        trips.append(len(commands))
        if len(trips) == 1:
            all_ask.wait(60)
        return answers(commands)

    monkeypatch.setattr(together, "_answers", slow)
    with ThreadPoolExecutor(THREADS) as threads:
        futures = [threads.submit(ask, number) for number in range(THREADS)]
        while len(together._asked) < THREADS - 1:
            all_ask.wait(0.001)
        all_ask.set()
        return [future.result(60) for future in futures], trips


def test_who_asks_while_another_one_is_answered_shares_the_next_round_trip(together, monkeypatch):
    def ask(number):
        return together.send("ECHO", str(number))

    answers, trips = at_the_same_time(together, monkeypatch, ask)
    assert answers == [str(number) for number in range(THREADS)]
    assert trips == [1, MOST_AT_ONCE, THREADS - 1 - MOST_AT_ONCE]
    assert together.send("PING") == "PONG" and not together._asked


def test_an_error_is_only_of_whom_asked_for_it(together, monkeypatch):
    def ask(number):
        try:
            return together.send(*(("INCR", "count") if number % 2 else ("NOSUCH", "x")))
        except redis.ResponseError as error:
            return "refused" if "unknown command" in str(error) else str(error)

    answers, _ = at_the_same_time(together, monkeypatch, ask)
    assert set(answers[::2]) == {"refused"}
    assert sorted(answers[1::2]) == [*range(1, THREADS // 2 + 1)]  # each was done once


def test_a_lost_connection_costs_nobody_the_answer(together, client):
    assert together.send("PING") == "PONG"
    client.client_kill_filter(_type="normal", skipme=True)
    assert together.send("ECHO", "there") == "there"


def test_who_waits_for_a_frozen_redis_holds_up_nobody_who_asks_later(together, client, monkeypatch):
    waits, goes_on, patient = Event(), Event(), client.execute_command

    def frozen(*command):
        waits.set()
        assert goes_on.wait(60)
        return patient(*command)

    monkeypatch.setattr(client, "execute_command", frozen)
    together._connection.socket_timeout = 0.2
    patient("CLIENT", "PAUSE", 2000)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(together.send, "ECHO", "first")
        assert waits.wait(60), "longer than the shared connection waits"
        together._connection.socket_timeout = 60
        assert together.send("ECHO", "second") == "second" and not first.done()
        goes_on.set()
        assert first.result(60) == "first"


def test_a_large_value_goes_by_another_connection(together):
    together._connection = None
    assert together.send("ECHO", "x" * (ALONE_BYTES + 1)) == "x" * (ALONE_BYTES + 1)


def test_all_who_ask_hear_of_a_redis_that_is_away(server):
    with connect("redis://127.0.0.1:1/0", retries=0) as nowhere:
        together = Together(nowhere)
        for _ in range(2):
            with pytest.raises(redis.ConnectionError):
                together.send("PING")


def test_a_redis_that_has_lost_the_scripts_gets_them_again(server, client, together):
    store = RolloutStore(client, Settings(redis_url=server.url), together)
    assert store.heartbeat([("nobody-s", 1)]) == ["lost"]
    client.script_flush()
    assert store.heartbeat([("nobody-s", 1)]) == ["lost"]
