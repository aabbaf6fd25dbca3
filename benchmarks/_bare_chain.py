"""What the pipeline is compared with: three no-op tasks as a bare Celery chain, nothing around them."""

from __future__ import annotations

import os

import redis
from celery import Celery, chain, signals

COUNTER = "bare:done"
QUEUES = ("bare_init", "bare_run", "bare_eval")

app = Celery("bare")
app.conf.update(
    broker_url=os.environ.get("ROLLOUT_REDIS_URL", "redis://127.0.0.1:6379/0"),
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    worker_disable_prefetch=True,
    worker_pool="threads",
    worker_hijack_root_logger=False,
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


def submit(count: int) -> None:
    """Send `count` chains the way Celery's documentation does."""
    for number in range(count):
        chain(init.s({"id": str(number), "attempt": 1, "node": None}), run.s(), evaluate.s()).apply_async()
