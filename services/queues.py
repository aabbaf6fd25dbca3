"""Queue names, the router function and the delivery settings of Celery.

The message is a doorbell; the truth is the record in Redis. Hence early acks and no result
backend: on Redis, late acks re-run long tasks past the visibility timeout and make a worker exit
when Redis restarts, and a chain's errbacks do not fire on every way a task can end.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

from celery import Celery

from rollout.schema import Stage
from services import broker, redis_address
from services.settings import Settings

STAGES = INIT, RUN, EVAL = tuple(stage.value for stage in Stage)

TASK_INIT = "rollout.init"
TASK_RUN = "rollout.run"
TASK_EVALUATE = "rollout.evaluate"
TASK_CLEANUP = "rollout.cleanup"
"""Releases the sandbox of a rollout that ended outside a stage; served by the EVAL fleet."""

STAGE_TASK = {INIT: TASK_INIT, RUN: TASK_RUN, EVAL: TASK_EVALUATE}
_STAGE_OF_TASK = {task: stage for stage, task in STAGE_TASK.items()} | {TASK_CLEANUP: EVAL}


class Ref(TypedDict):
    """What a message for RUN or EVAL carries: never the trajectory, only where to find it."""

    id: str
    attempt: int
    node: str | None
    """Node that holds the rollout's sandbox; None before there is one, or where none is used."""
    handler: NotRequired[str]
    """The handler's name, for those who read messages; absent where the sender does not know it."""
    stamp: NotRequired[int]
    """Of the sender, see `services.version`; absent before there was one."""


def queue_for(stage: str, node: str | None) -> str:
    """The queue of a stage: the node's own when a sandbox lives there, for its socket does too."""
    return f"{stage}.{node}" if node and stage in (RUN, EVAL) else stage


def route(name: str, args: Any, kwargs: Any, options: Any, task: Any = None, **_: Any) -> dict | None:
    """Celery router function: picks the queue from the reference in the first argument, if there is one."""
    stage = _STAGE_OF_TASK.get(name)
    if stage is None:
        return None
    ref = args[0] if args else {}
    return {"queue": queue_for(stage, ref.get("node"))}


def describe(ref: Ref) -> str:
    """A reference as Flower, whose list cuts it, and the log of Celery show it."""
    handler = f"{ref['handler']} " if ref.get("handler") else ""
    node = f" on {ref['node']}" if ref.get("node") else ""
    return f"{handler}{ref['id']} attempt {ref['attempt']}{node}"


def make_celery(settings: Settings) -> Celery:
    """The Celery application, the same for those who send and those who work."""
    broker.register()
    app = Celery("rollout", set_as_current=True)
    broker_url, broker_options = redis_address.parse(settings.redis_url).broker()
    app.conf.update(
        broker_url=broker_url,
        result_backend=None,
        task_ignore_result=True,
        task_acks_late=False,
        accept_content=["json"],
        task_routes=(route,),
        task_default_queue=INIT,
        # One at a time: a rollout reserved by a busy worker would wait while another one idles.
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        worker_pool="threads",
        worker_concurrency=settings.worker_slots,
        worker_send_task_events=True,
        # `_say_arguments` says what monitors show; Celery's own text of every argument costs more.
        task_repr_maxlevels=1,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_transport_options={
            # No copy of each message in hand is kept in Redis: four commands a message, to bring back what
            # the reaper brings back sooner.
            "ack_emulation": False,
            "socket_timeout": 10,
            "socket_connect_timeout": 5,
            "health_check_interval": 10,
            "queue_order_strategy": "round_robin",
            **broker_options,
        },
    )
    return app
