"""A stage that is interrupted at an awkward moment still has its outcome."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent import futures
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import redis
from celery.exceptions import Ignore
from kombu.asynchronous import Hub
from kombu.asynchronous.timer import Timer

from rollout.schema import Stage
from services.state.rollouts.store import Finish
from tests.helpers.stack import wait_until
from workers import task as task_module
from workers.held import CANCEL, LOST, SHUTDOWN, Held
from workers.process import FREED_S, WorkerProcess
from workers.wave import in_turn

TASK = SimpleNamespace(request=SimpleNamespace(id="t", root_id="t"))


@pytest.fixture
def loop():
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


class Run:
    """As much of a `StageRun` as `work` and `_run_stage` take."""

    def __init__(self, loop, reason=None):
        self.held = Held("r", Stage.RUN, reason=reason)
        self.claim = SimpleNamespace(deadline_in_s=60.0, stage=Stage.RUN)
        self.finished: list[Finish] = []
        self.released = 0
        self.while_cleaning = lambda: None
        self.can_pass_on, self.has_sandbox, self.is_ours = False, True, True
        store = SimpleNamespace(finish=lambda claim, outcome: self.finished.append(outcome) or "entered")
        store.decide = lambda claim, outcome: self.is_ours
        self.process = SimpleNamespace(loop=loop, store=store, let_go=lambda held: None)
        self.process.stopping, self.process.consumer = threading.Event(), None
        self.names: dict[str, str] = {}

    async def clean_up(self):
        self.while_cleaning()
        await asyncio.sleep(0.05)
        self.released += 1


@pytest.mark.parametrize(("reason", "entered"), [(CANCEL, "cancelled"), (SHUTDOWN, "handback")])
def test_before_its_first_step_it_is_handed_on_and_cleaned_up(loop, monkeypatch, reason, entered):
    run = Run(loop, reason)
    monkeypatch.setattr(task_module, "_after", lambda *args: args[-1])

    async def body(run):
        raise AssertionError("it was interrupted before")

    outcome = task_module._run_stage(run.process, TASK, run, body)
    assert outcome.next == entered
    assert run.finished == [outcome]
    assert run.released == 1


def test_of_what_is_somebody_elses_by_now_nothing_is_released(loop, monkeypatch):
    run = Run(loop, CANCEL)
    run.is_ours = False
    monkeypatch.setattr(task_module, "_after", lambda *args: args[-2:])
    assert task_module._run_stage(run.process, TASK, run, None) == (LOST, None)
    assert (run.finished, run.released) == ([], 0)


def test_while_it_cleans_up_its_outcome_stands(loop, monkeypatch):
    run = Run(loop)
    monkeypatch.setattr(task_module, "_after", lambda *args: args[-1])
    run.while_cleaning = lambda: run.held.interrupt(SHUTDOWN)
    done = Finish("completed")

    async def body(run):
        return done

    assert task_module._run_stage(run.process, TASK, run, body) == done
    assert run.released == 1


def test_while_it_works_it_ends(loop):
    run = Run(loop)

    async def body(run):
        run.held.interrupt(CANCEL)
        await asyncio.sleep(60)

    doing = asyncio.run_coroutine_threadsafe(in_turn(run.process, TASK.request, run, body), loop)
    assert doing.result()[1].next == "cancelled"


def test_what_the_loop_cancels_arrives_as_the_error_that_is_caught(loop):
    async def cancelled():
        raise asyncio.CancelledError

    with pytest.raises(futures.CancelledError):
        asyncio.run_coroutine_threadsafe(cancelled(), loop).result()


@pytest.mark.parametrize(("others", "asks"), [(1, True), (0, False)], ids=["full", "a slot was free"])
def test_only_a_task_of_a_full_worker_has_celery_ask_at_its_end(others, asks):
    hub = Mock()
    process = SimpleNamespace(consumer=SimpleNamespace(hub=hub), services=SimpleNamespace(slots=2))
    process._lock, process.tasks, process._turn_soon = threading.Lock(), others, None
    with WorkerProcess.slot(process):
        assert not hub.mock_calls
    assert (bool(hub.mock_calls), process.tasks) == (asks, others)


def test_when_it_ends_celery_looks_for_the_next_message_before_its_loop_would_turn(monkeypatch):
    hub = Hub(Timer(max_interval=60))
    turns, ends = [], socket.socketpair()
    hub.add_reader(ends[0], list)  # without any it would not wait
    hub.on_tick.add(lambda: turns.append(time.monotonic()))
    hub.call_later(3600.0, list)  # with a timer far away it turns every ten seconds by itself, else every one
    thread = threading.Thread(target=hub.run_forever)
    thread.start()
    try:
        wait_until(lambda: turns, 10, "the loop to turn")

        class Process(SimpleNamespace):
            slot, _turn_soon = WorkerProcess.slot, WorkerProcess._turn_soon

            def claiming(self):
                self.asked_at = time.monotonic()
                raise redis.ConnectionError("away")

        process = Process(consumer=SimpleNamespace(hub=hub), services=SimpleNamespace(slots=2))
        process._lock, process.tasks, process._turns_at = threading.Lock(), 1, 0.0
        monkeypatch.setattr(task_module.processes, "current", lambda: process)
        with pytest.raises(Ignore):
            task_module.run_stage(TASK, Stage.INIT, None)
        wait_until(lambda: turns[-1] >= process.asked_at + FREED_S, 8, "it to turn once the slot is free")
    finally:
        hub.stop()
        thread.join()
        hub.close()
        for end in ends:
            end.close()
