"""The peer of the pipeline: three no-op tasks as a bare Celery chain, nothing around them.

It has the best that we know of Celery, and whatever the service has: the same settings (no copies of messages
in hand, threads, one message at a time), the same bundles of events, the same changes of kombu as long as
there are any, messages sent in batches and without the building of signatures. What ours takes more is what
the service adds.
"""

from __future__ import annotations

import redis
from celery import signals

from services.queues import make_celery
from services.settings import settings
from workers import events

DONE = "equal_chain:done"
"""Counts the chains that have ended."""
QUEUES = ("equal_init", "equal_run", "equal_eval")
MESSAGES_AT_ONCE = 64
"""In one round trip, as the service has it."""

app = make_celery(settings())
events.bundle(app)
_redis = redis.from_url(settings().redis_url)


@signals.setup_logging.connect
def _quiet(**_: object) -> None:
    """As quiet as our own workers: two log lines a task would slow the comparison down."""


@app.task(queue=QUEUES[0])
def init(ref: dict) -> dict:
    return ref


@app.task(queue=QUEUES[1])
def run(ref: dict) -> dict:
    return ref


@app.task(queue=QUEUES[2])
def evaluate(ref: dict) -> dict:
    # The one thing it does: somebody must see that it is done.
    _redis.incr(DONE)
    return ref


def submit(count: int) -> None:
    """Send the messages that `chain(init.s(ref), run.s(), evaluate.s())` sends, `count` times."""
    following = [dict(evaluate.s()), dict(run.s())]  # the last one goes next
    with app.producer_or_acquire() as producer, producer.batch(MESSAGES_AT_ONCE):
        for number in range(count):
            ref = {"id": str(number), "attempt": 1, "node": None, "handler": "noop"}
            init.apply_async((ref,), chain=following, producer=producer)
