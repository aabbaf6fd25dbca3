"""Celery's events of tasks reach who watches: all of them, in bundles, and again after a lost connection."""

from __future__ import annotations

import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from kombu.exceptions import OperationalError

from rollout.schema import RolloutRequest
from services.queues import TASK_EVALUATE, TASK_INIT, TASK_RUN, make_celery
from services.settings import Settings
from tests.helpers.stack import Stack, stop_all, wait_until
from workers import events

COUNT = 40
PATIENCE_S = 120


class Watcher:
    """Counts the events of tasks as Flower receives them."""

    def __init__(self, url):
        self.seen = Counter()
        self.names, self.hosts, self.roots = {}, {}, {}
        self.beat_at = 0.0
        """When the newest heartbeat of a worker was sent."""
        self.args = {}
        """All that events have said of a task's arguments, one after the other."""
        self.app = make_celery(Settings(redis_url=url))
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        while not self.stopping.is_set():
            try:
                with self.app.connection_for_read() as connection:
                    self.receiver = self.app.events.Receiver(connection, handlers={"*": self.note})
                    # Without a timeout: it ends the subscription, and what comes until the next one is lost.
                    self.receiver.capture(wakeup=False)
            except (OperationalError, *self.app.connection().connection_errors):
                continue

    def note(self, event):
        if event["type"] == "task-received":
            self.roots[event["uuid"]] = event["root_id"]
            self.names[event["uuid"]], self.hosts[event["uuid"]] = event["name"], event["hostname"]
        if event["type"] == "worker-heartbeat":
            self.beat_at = max(self.beat_at, event["timestamp"])
        if "args" in event:
            self.args.setdefault(event["uuid"], []).append(event["args"])
        self.seen[event["type"], event.get("uuid")] += 1

    def ended(self):
        """By name of the task: those of which all three events came."""
        kinds = ("task-received", "task-started", "task-succeeded")
        # Copied at once: the thread goes on to add to it.
        whole = [uuid for uuid in list(self.names) if all(self.seen[kind, uuid] for kind in kinds)]
        return Counter(self.names[uuid] for uuid in whole)

    def close(self):
        self.stopping.set()
        self.receiver.should_stop = True
        self.thread.join(10)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A service of the file's own, whose workers may be ended."""
    # Tests count tasks: nothing may be sent or done again because the machine is slow.
    env = {"ROLLOUT_LEASE_S": "15", "ROLLOUT_REQUEUE_S": "20"}
    with (
        tempfile.TemporaryDirectory(prefix="re-", dir="/tmp") as sandboxes,
        Stack(tmp_path_factory.mktemp("events"), Path(sandboxes), env) as stack,
    ):
        stack.start_worker("init,run,eval", "all")
        yield stack


@pytest.fixture
def watcher(world):
    watcher = Watcher(world.redis.url)
    wait_until(lambda: watcher.beat_at, PATIENCE_S, "the watcher to hear of workers")
    yield watcher
    watcher.close()


def published(world):
    return world.redis.client.info("commandstats").get("cmdstat_publish", {}).get("calls", 0)


def test_all_events_come_and_in_fewer_messages_than_tasks(world, watcher):
    before, began = published(world), time.monotonic()
    world.client.run([RolloutRequest(handler="noop") for _ in range(COUNT)])
    # A bundle is sent every so often, however little is in it.
    bundles = (time.monotonic() - began) / events.SEND_EVERY_S
    counts = dict.fromkeys((TASK_INIT, TASK_RUN, TASK_EVALUATE), COUNT)
    wait_until(lambda: watcher.ended() >= Counter(counts), PATIENCE_S, "the events of all")
    assert published(world) - before < 3 * COUNT + bundles, "ten events a rollout, sent nearly one by one"


@pytest.mark.parametrize("by_itself", [False, True], ids=["celery", "slots"])
def test_each_task_says_once_which_rollout_it_works_on(world, watcher, by_itself):
    beginners = world.start_workers({"beginner": "init"}, slots=1) if by_itself else []
    requests = [RolloutRequest(handler="noop", priority=k % 3) for k in range(COUNT)]
    expected = Counter(f"noop {item.id} attempt 1" for item in world.client.run(requests))
    wait_until(lambda: watcher.ended()[TASK_EVALUATE] == COUNT, PATIENCE_S, "the events of all")
    args_of = {
        task: [watcher.args[uuid] for uuid, name in list(watcher.names.items()) if name == task]
        for task in (TASK_INIT, TASK_RUN, TASK_EVALUATE)
    }
    assert {first for first, *_ in args_of[TASK_INIT]} == {"()"}
    assert Counter(args for _, *after in args_of[TASK_INIT] for args in after) == expected
    for task in (TASK_RUN, TASK_EVALUATE):
        assert Counter(args for (args,) in args_of[task]) == expected
    assert {watcher.roots[uuid] for uuid in watcher.names} <= {*watcher.names}, "a chain begins with a task"
    stop_all(beginners)


def test_they_come_after_the_connections_were_lost(world, watcher):
    for kind in ("normal", "pubsub"):
        world.redis.client.client_kill_filter(_type=kind, skipme=True)
    killed_at = time.time()
    watcher.seen.clear()
    # One that was sent before may be read only now.
    wait_until(lambda: watcher.beat_at > killed_at, PATIENCE_S, "the watcher to hear of workers again")
    before = watcher.ended()[TASK_EVALUATE]
    world.client.run([RolloutRequest(handler="noop") for _ in range(5)])
    wait_until(
        lambda: watcher.ended()[TASK_EVALUATE] >= before + 5, PATIENCE_S, "events after a lost connection"
    )


def test_those_of_tasks_that_end_while_their_worker_stops_come(world, watcher):
    # With one for INIT alone: the other worker does none once all its slots are taken by RUN.
    names = {"leaving": "run", "beginner": "init"}
    worker, beginner = world.start_workers(names, slots=20)
    # More than the other worker has slots for, should that be the quicker one.
    world.client.submit([RolloutRequest(handler="noop", task={"run_s": 90.0}) for _ in range(90)])

    def begun():
        mine = [uuid for uuid, host in list(watcher.hosts.items()) if host.startswith("leaving@")]
        return {uuid for uuid in mine if watcher.seen["task-started", uuid]}

    wait_until(lambda: len(begun()) >= 10, PATIENCE_S, "tasks of the worker")
    worker.popen.send_signal(signal.SIGTERM)
    worker.popen.wait(PATIENCE_S)
    wait_until(lambda: all(watcher.seen["task-stopped", uuid] for uuid in begun()), PATIENCE_S, "their ends")
    beginner.stop()


def test_what_was_collected_when_the_connection_was_lost_goes_with_the_next(server):
    app = make_celery(Settings(redis_url=server.url))
    events.bundle(app)
    with server.client.pubsub() as channel, app.connection_for_write() as connection:
        channel.psubscribe("*celeryev*")
        lost = app.events.Dispatcher(connection, buffer_group=["task"], on_send_buffered=None)
        lost.send("task-succeeded", uuid="one")
        lost.close()
        dispatcher = app.events.Dispatcher(connection, buffer_group=["task"], on_send_buffered=None)
        dispatcher.extend_buffer(lost)
        dispatcher.flush()
        assert wait_until(lambda: (channel.get_message() or {}).get("type") == "pmessage", 10, "the event")
