"""The worker of the gateway where two things happen at once: real sockets, a real poller, no server."""

from __future__ import annotations

import logging
import selectors
import socket
import time
from types import SimpleNamespace

import pytest
from gunicorn.config import Config

from services.gateway.parking import Connection, ParkingWorker
from services.gateway.waiting import Parked, ParkedWaiter, StreamBody


class Room:
    """As much of a waiting room as a waiter needs."""

    def __init__(self):
        self.leavers = []

    def leave(self, waiter):
        self.leavers.append(waiter)


@pytest.fixture
def worker():
    cfg = Config()
    cfg.set("threads", 4)
    worker = ParkingWorker(1, 1, [], None, 30, cfg, logging.getLogger("gunicorn.error"))
    worker.poller = selectors.DefaultSelector()
    worker.method_queue.init()
    worker.enqueued = []
    worker.enqueue_req = worker.enqueued.append
    yield worker
    worker.poller.close()
    worker.method_queue.close()


@pytest.fixture
def parked(worker):
    ours, client = socket.socketpair()
    conn = Connection(worker.cfg, ours, ("127.0.0.1", 1), ("127.0.0.1", 2))
    worker.nr_conns += 1
    waiter = conn.waiter = ParkedWaiter(SimpleNamespace(), conn)
    waiter.room, waiter.deadline = Room(), float("inf")
    worker._park(conn, waiter)
    yield SimpleNamespace(conn=conn, waiter=waiter, client=client)
    ours.close()
    client.close()


def hang_up(worker, parked):
    parked.client.close()
    events = worker.poller.select(60)
    assert [key.fileobj for key, _ in events] == [parked.conn.sock]
    return events


def test_a_wake_and_a_client_that_hangs_up_may_come_in_one_look_at_the_poller(worker, parked):
    events = hang_up(worker, parked)
    worker._wake(parked.conn, parked.waiter)
    for key, _ in events:
        key.data(key.fileobj)
    assert worker.enqueued == [parked.conn], "its thread will find that the client has gone"
    assert worker.nr_conns == 1


def test_a_wake_that_comes_after_the_client_has_gone_wakes_nobody(worker, parked):
    for key, _ in hang_up(worker, parked):
        key.data(key.fileobj)
    assert worker.nr_conns == 0 and parked.waiter.room.leavers == [parked.waiter]
    worker._wake(parked.conn, parked.waiter)
    assert worker.enqueued == []


def test_a_connection_that_lingers_may_be_given_up_in_the_look_that_finds_it_closed(worker, parked):
    worker._unwatch(parked.conn)
    worker._linger(parked.conn)
    events = hang_up(worker, parked)
    worker._drop(parked.conn)
    for key, _ in events:
        key.data(key.fileobj)
    assert worker.nr_conns == 0


def test_timers_of_requests_that_have_ended_are_swept(worker, parked):
    for _ in range(5000):
        worker._unwatch(parked.conn)
        worker._park(parked.conn, parked.waiter)
    assert len(worker._timers) < 1000


def test_who_is_parked_goes_on_when_its_time_is_up_and_not_before(worker, parked):
    worker._unwatch(parked.conn)
    parked.waiter.deadline = time.monotonic() + 60.0
    worker._park(parked.conn, parked.waiter)
    worker._timers.insert(0, (0.0, -1, parked.conn))  # of an earlier wait, whose time has come
    worker.wait_for_and_dispatch_events(0.0)
    assert worker.enqueued == []
    worker._unwatch(parked.conn)
    began = time.monotonic()
    parked.waiter.deadline = began + 0.1
    worker._park(parked.conn, parked.waiter)
    worker.wait_for_and_dispatch_events(30.0)
    assert 0.1 <= time.monotonic() - began < 15.0, "the poller sleeps no longer than whoever is next"
    assert worker.enqueued == [parked.conn] and not parked.waiter.over
    assert worker._watched == {}


def test_a_stop_wakes_all_that_are_parked(worker, parked):
    worker.alive = False
    worker.wait_for_and_dispatch_events(0.0)
    assert worker.enqueued == [parked.conn] and parked.waiter.over


def test_tls_of_its_own_is_refused_with_what_to_do_instead():
    cfg = Config()
    cfg.set("certfile", __file__)
    with pytest.raises(RuntimeError, match="proxy"):
        ParkingWorker.check_config(cfg, logging.getLogger())


def test_a_stream_that_ends_when_it_goes_on_gives_its_place_back(parked):
    closed = []

    class Body:
        def __iter__(self):
            return iter([parked.waiter])

        def close(self):
            closed.append(True)

    body = StreamBody(Body(), parked.waiter)
    with pytest.raises(Parked):
        next(body)
    body.close()
    assert not closed, "it merely waits"
    assert next(body, None) is None
    body.close()
    assert closed


def test_a_timer_holds_no_body_of_a_connection_that_was_dropped(worker, parked):
    parked.conn.inbox.add(b"x" * 1000)
    worker._drop(parked.conn)
    assert len(parked.conn.inbox) == 0 and parked.conn in [conn for *_, conn in worker._timers]
