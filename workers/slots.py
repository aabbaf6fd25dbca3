"""`celery control set_slots N`: how many rollouts a running worker carries at once.

The threads pool neither grows nor shrinks, and `pool_grow` fails on it. But its threads are started as they
are needed, and the consumer asks for a message only while less is in hand than `max_concurrency`, the field
that Celery's own autoscaler sets. So a worker started with `-c MOST` is given fewer slots, and up to MOST
again, without losing what it holds: over a lowered limit it finishes what it has and takes nothing new.
"""

from __future__ import annotations

from typing import Any

import redis
import structlog
from celery.worker.control import control_command

from workers import process

log = structlog.get_logger("worker")


@control_command(args=[("slots", int)], signature="<slots>")
def set_slots(state: Any, slots: int | None = None, **_: Any) -> dict[str, str]:
    """Have the worker carry so many rollouts at once, up to what it was started with (-c)."""
    consumer = state.consumer
    most = consumer.pool.num_processes
    if not isinstance(slots, int) or not 1 <= slots <= most:
        return {
            "error": f"set_slots {slots}: from 1 to {most}, with which this worker was started; for more, "
            "start it with a larger -c or start another one; to have it take nothing, end it with SIGTERM"
        }
    try:
        services = process.current().services
    except RuntimeError:
        return {"error": "the worker is still starting; try again when it is ready"}
    before = services.slots
    consumer.controller.max_concurrency = slots
    services.slots = slots
    try:
        services.announce()
    except redis.RedisError as error:
        # The next announcement, seconds from now, says it.
        log.warning("announcement failed", error=str(error))
    log.info("slots changed", before=before, now=slots, most=most)
    return {"ok": f"{slots} slots (of {most}), {before} before"}
