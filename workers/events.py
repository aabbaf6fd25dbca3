"""Celery's events of tasks, sent in bundles.

Celery publishes them nearly one by one, which takes a twelfth of a worker's time where rollouts are short.
Whoever watches (Flower, `celery events`) gets them a tenth of a second later.
"""

from __future__ import annotations

from typing import Any, ClassVar

from celery import bootsteps

SEND_EVERY_S = 0.1
MOST_AT_ONCE = 500
"""Events; so many are sent at once even before it is time."""


class EventBundles(bootsteps.StartStopStep):
    """A step of the worker: started anew with each connection, after Celery has made its dispatcher."""

    requires: ClassVar = {"celery.worker.consumer.events:Events"}

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._timer: Any = None

    def start(self, consumer: Any) -> None:
        """Have the dispatcher collect, and the worker's loop send."""
        dispatcher = consumer.event_dispatcher
        if consumer.hub is None:
            return
        dispatcher.on_send_buffered = None
        dispatcher.buffer_limit = MOST_AT_ONCE
        self._timer = consumer.hub.call_repeatedly(SEND_EVERY_S, dispatcher.flush)

    def stop(self, consumer: Any) -> None:
        """Send what is left; a dispatcher whose connection is lost keeps it for the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            if consumer.event_dispatcher is not None:
                consumer.event_dispatcher.flush()
