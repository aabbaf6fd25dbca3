"""Celery's messages of our tasks, as `chain(init.s(), run.s(), evaluate.s()).apply_async()` sends them.

They are written without Celery, which clones, names and declares for each what is the same in all: 300 µs of
a processor, and 10 here. Missing are the ids of results that nobody keeps; a test compares the rest field by
field.
"""

from __future__ import annotations

import os
import socket
from base64 import b64encode
from collections.abc import Sequence
from uuid import uuid4

from celery import Celery
from pydantic_core import to_json

from services.queues import STAGE_TASK, Ref, describe, route

_TASKS = [*STAGE_TASK.values()]
_LINK = {"args": [], "kwargs": {}, "options": {}, "subtask_type": None, "immutable": False}
_CHAINS = {
    task: [{"task": later, **_LINK} for later in reversed(_TASKS[at:])] for at, task in enumerate(_TASKS, 1)
}
"""What follows each task, as a message carries it: the last of the list goes next."""
_NOT_USED = "shadow", "eta", "expires", "group", "group_index", "ignore_result", "stamped_headers"


def message(
    app: Celery, task: str, args: Sequence[Ref], root_id: str = "", parent_id: str | None = None
) -> bytes:
    """A message for a task, what follows in its chain included, as kombu keeps it in Redis.

    Args:
        root_id: The task that the chain began with; empty = this one.
        parent_id: The one before; None = there is none.
    """
    task_id = str(uuid4())
    embedded = {"callbacks": None, "errbacks": None, "chain": _CHAINS.get(task), "chord": None}
    headers = {
        "lang": "py",
        "task": task,
        "id": task_id,
        **dict.fromkeys(_NOT_USED),
        "retries": 0,
        "timelimit": [None, None],
        "root_id": root_id or task_id,
        "parent_id": parent_id,
        "argsrepr": describe(args[0]) if args else "()",
        "kwargsrepr": "{}",
        "origin": f"gen{os.getpid()}@{socket.gethostname()}",
        "replaced_task_nesting": 0,
        "stamps": {},
    }
    properties = {
        "correlation_id": task_id,
        "reply_to": app.thread_oid,
        "delivery_mode": 2,
        "delivery_info": {"exchange": "", "routing_key": route(task, args, None, None)["queue"]},
        "priority": 0,
        "body_encoding": "base64",
        "delivery_tag": str(uuid4()),
    }
    sent = {
        "body": b64encode(to_json([args, {}, embedded])).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": headers,
        "properties": properties,
    }
    return to_json(sent)
