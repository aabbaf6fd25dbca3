"""Celery's events of tasks reach who watches: all of them, in bundles, and again after a lost connection."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from kombu.exceptions import OperationalError

from rollout.schema import RolloutRequest
from services.queues import TASK_EVALUATE, TASK_INIT, TASK_RUN, make_celery
from services.settings import Settings
from tests.helpers.stack import wait_until

COUNT = 40


class Watcher:
    """Counts the events of tasks as Flower receives them."""

    def __init__(self, url):
        self.seen = Counter()
        self.names = {}
        self.app = make_celery(Settings(redis_url=url))
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def watch(self):
        while not self.stopping.is_set():
            try:
                with self.app.connection_for_read() as connection:
                    self.app.events.Receiver(connection, handlers={"*": self.note}).capture(
                        limit=None, timeout=1, wakeup=False
                    )
            except (TimeoutError, OperationalError, *self.app.connection().connection_errors):
                continue

    def note(self, event):
        if event["type"] == "task-received":
            self.names[event["uuid"]] = event["name"]
        self.seen[event["type"], event.get("uuid")] += 1

    def ended(self):
        """By name of the task: those of which all three events came."""
        kinds = ("task-received", "task-started", "task-succeeded")
        whole = [uuid for uuid in self.names if all(self.seen[kind, uuid] for kind in kinds)]
        return Counter(self.names[uuid] for uuid in whole)

    def close(self):
        self.stopping.set()
        self.thread.join(10)


@pytest.fixture
def watcher(stack):
    watcher = Watcher(stack.redis.url)
    wait_until(lambda: watcher.seen["worker-heartbeat", None], 20, "the watcher to hear of workers")
    yield watcher
    watcher.close()


def published(stack):
    return stack.redis.client.info("commandstats").get("cmdstat_publish", {}).get("calls", 0)


def test_all_events_come_and_in_fewer_messages_than_tasks(stack, client, watcher):
    before = published(stack)
    client.run([RolloutRequest(handler="noop") for _ in range(COUNT)])
    wanted = dict.fromkeys((TASK_INIT, TASK_RUN, TASK_EVALUATE), COUNT)
    wait_until(lambda: watcher.ended() >= Counter(wanted), 20, f"events: {watcher.ended()}")
    assert published(stack) - before < 2 * COUNT, "nine events a rollout, sent nearly one by one"


def test_they_come_after_the_connections_were_lost(stack, client, watcher):
    for kind in ("normal", "pubsub"):
        stack.redis.client.client_kill_filter(_type=kind, skipme=True)
    watcher.seen.clear()
    wait_until(lambda: watcher.seen["worker-heartbeat", None], 30, "the watcher to hear of workers again")
    before = watcher.ended()[TASK_EVALUATE]
    client.run([RolloutRequest(handler="noop") for _ in range(5)])
    wait_until(lambda: watcher.ended()[TASK_EVALUATE] >= before + 5, 20, "events after a lost connection")
