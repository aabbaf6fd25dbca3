"""What the pipeline is compared with: three no-op tasks as a bare Celery chain, nothing around them.

A second fleet of it, started with BARE_ACK_EMULATION=0 on queues of its own (`UNACKED`), keeps no copies of
messages in Redis, as our own workers do not.
"""

from __future__ import annotations

import os

import redis
from celery import Celery, chain, signals

COUNTER = "bare:done"
QUEUES = ("bare_init", "bare_run", "bare_eval")
UNACKED = "unacked_"
"""Prefix of the queues of the second fleet."""

app = Celery("bare")
app.conf.update(
    broker_url=os.environ.get("ROLLOUT_REDIS_URL", "redis://127.0.0.1:6379/0"),
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    worker_disable_prefetch=True,
    worker_pool="threads",
    worker_hijack_root_logger=False,
    broker_transport_options={"ack_emulation": os.environ.get("BARE_ACK_EMULATION") != "0"},
)
_client = redis.from_url(app.conf.broker_url)


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
    _client.incr(COUNTER)
    return ref


def submit(count: int, prefix: str = "") -> None:
    """Send `count` chains the way Celery's documentation does; to other queues with a prefix."""
    for number in range(count):
        parts = [init.s({"id": str(number), "attempt": 1, "node": None}), run.s(), evaluate.s()]
        if prefix:
            parts = [part.set(queue=prefix + queue) for part, queue in zip(parts, QUEUES, strict=True)]
        chain(*parts).apply_async()
