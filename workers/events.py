"""Celery's events of tasks, sent in bundles, and the service's own among them.

Celery publishes them nearly one by one, which takes a twelfth of a worker's time where rollouts are short.
Whoever watches (Flower, `celery events`) gets them a tenth of a second later. Two kinds are ours:
`task-claimed` tells which rollout a task of INIT took, `task-stopped` why a chain ends with this task.
"""

from __future__ import annotations

from typing import Any, ClassVar

import redis
import structlog
from celery import Celery, bootsteps
from celery.events.dispatcher import EventDispatcher
from kombu.exceptions import KombuError

log = structlog.get_logger("events")

SEND_EVERY_S = 0.1
MOST_AT_ONCE = 500
"""Events; so many are sent at once even before it is time."""


class Dispatcher(EventDispatcher):
    """Celery's, which takes over what its predecessor had collected when the connection was lost."""

    def extend_buffer(self, other: Dispatcher) -> None:
        """Take over what another one has not sent."""
        super().extend_buffer(other)
        for group, events in other._group_buffer.items():
            self._group_buffer[group] += events


class Bundles(bootsteps.StartStopStep):
    """A step of the worker: started anew with each connection, after Celery has made its dispatcher."""

    requires: ClassVar = {"celery.worker.consumer.events:Events"}

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._timer: Any = None

    def start(self, consumer: Any) -> None:
        """Have the dispatcher collect, and the worker's loop send."""
        if consumer.hub is None:
            return
        dispatcher = consumer.event_dispatcher
        dispatcher.on_send_buffered = None
        dispatcher.buffer_limit = MOST_AT_ONCE
        self._timer = consumer.hub.call_repeatedly(SEND_EVERY_S, dispatcher.flush)

    def stop(self, consumer: Any) -> None:
        """Send what is left; where the worker ends, tasks that end later send each its own."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        if consumer.event_dispatcher is not None:
            if consumer.blueprint.state != bootsteps.RUN:
                consumer.event_dispatcher.buffer_limit = 1
            consumer.event_dispatcher.flush()


def bundle(app: Celery) -> None:
    """Have the workers of this application do so."""
    app.events.dispatcher_cls = Dispatcher
    app.steps["consumer"].add(Bundles)


def tell(consumer: Any, kind: str, task_id: str, **fields: Any) -> None:
    """Send an event of a task behind those that the worker's consumer has sent of it.

    `task.send_event` would overtake them, for it is not bundled.
    """
    dispatcher = getattr(consumer, "event_dispatcher", None)
    if dispatcher is None or not dispatcher.enabled:
        return
    try:
        dispatcher.send(kind, uuid=task_id, **fields)
    except (KombuError, redis.RedisError) as error:
        log.debug("monitors were not told", kind=kind, error=str(error))
